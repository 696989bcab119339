#!/bin/sh
# hami_core_for_image.sh SOURCE OUTPUT: what the Containerfile does for HAMi-core's library. An archive or a folder of it in
# native/sources comes before SOURCE; where there is neither, no library is made.
set -eu
here=$(dirname "$0")
for archive in "$here"/sources/HAMi-core*; do
  if [ -e "$archive" ]; then set -- "$archive" "$2"; fi
done
case "$1" in
  "") echo "HAMi-core: left out, this image refuses shares under isolation hami-core"; exit 0 ;;
  *://*) apt-get update -qq && apt-get install -qq -y --no-install-recommends git ca-certificates >/dev/null ;;
esac
sha256=$(cd "$here" && python -c 'import build_hami_core; print(build_hami_core.SHA256)')
python "$here/build_hami_core.py" "$1" --sha256 "$sha256" --include /opt/compiler/nvidia/cu13/include \
  --target "$(uname -m)-linux-gnu.2.17" --output "$2"
