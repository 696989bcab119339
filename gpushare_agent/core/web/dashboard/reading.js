// Asks this page's server. What goes wrong is an Error with the server's own reason.

const SILENT_MS = 10000; // no answer for so long: the connection is dead, whatever the browser believes

/** The answer, also 304. Throws where it is not answered, or with an error. */
export async function read(path, headers = {}, silentMs = SILENT_MS) {
  const answer = await fetch(path, { headers, cache: "no-store", signal: AbortSignal.timeout(silentMs) });
  if (!answer.ok && answer.status !== 304) throw new Error(reason(answer.status, await answer.text()));
  return answer;
}

function reason(status, text) {
  try {
    return String(JSON.parse(text).error);
  } catch {
    return `${status}: ${text.slice(0, 500)}`;
  }
}
