# In a mount namespace of its own: a container of tests/real_isolation/libraries.py. What follows are its directory and the one
# of all that was built, then variables and the program.
set -e
own=$1 base=$2
shift 2
root=$own/root
mount --make-rprivate /
mount -t tmpfs tmpfs "$root"
cd "$root"
mkdir usr proc dev tmp etc
for name in bin sbin lib lib64; do
    [ ! -L /$name ] || cp -P /$name .
done
mount --rbind /usr usr
mount -t tmpfs tmpfs usr/local
mkdir -p usr/local/nvidia/bin
[ ! -f "$own/gpu-client" ] || cp "$own/gpu-client" usr/local/nvidia/bin
mount --rbind /proc proc
mount --bind "$base/proc" proc/driver
mount --rbind /dev dev
mount --bind "$own/tmp" tmp
mkdir -p "./$base"
mount --bind "$base" "./$base"
mount --bind "$own/etc" etc
exec chroot . /usr/bin/env "$@"
