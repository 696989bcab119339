// What was admitted and refused lately, and why: the newest first; opened, an entry shows every GPU at that time.

import { arrange, byId, h, write } from "./dom.js";
import * as format from "./format.js";

const SHOWN = 50;

export class Decisions {
  constructor(store) {
    this.store = store;
    this.entries = new Map(); // number -> element
    this.isOnlyRefused = false;
    byId("only-refused").addEventListener("change", (event) => {
      this.isOnlyRefused = event.target.checked;
      this.draw();
    });
  }

  draw() {
    const all = this.store.decisions;
    const known = new Set(all.map((one) => one.number));
    for (const number of this.entries.keys()) if (!known.has(number)) this.entries.delete(number);
    const shown = all.filter((one) => !this.isOnlyRefused || one.outcome === "refused").slice(0, SHOWN);
    arrange(byId("decisions"), shown.map((one) => this.#entry(one)));
    const empty = byId("decisions-empty");
    empty.hidden = shown.length > 0;
    write(empty, all.length ? "None of the last admissions was refused." : "Nothing was admitted or refused since the agent started.");
  }

  #entry(decision) {
    if (!this.entries.has(decision.number)) this.entries.set(decision.number, makeEntry(decision));
    return this.entries.get(decision.number);
  }
}

function makeEntry(decision) {
  const isRefused = decision.outcome === "refused";
  const name = decision.pod ? `${decision.namespace}/${decision.pod}` : "a pod that could not be identified";
  const result = isRefused ? decision.reason : format.gpuNames(decision.labels);
  const body = h("div", { class: "decision-body" });
  const details = h("details", {},
    h("summary", {},
      h("time", { datetime: new Date(decision.at * 1000).toISOString(), title: format.moment(decision.at) }, format.clock(decision.at)),
      h("span", { class: "outcome", "data-kind": isRefused ? "bad" : "good" }, isRefused ? "✕ Refused" : "✓ Placed"),
      h("span", { class: "decision-name" }, name, decision.container ? h("span", { class: "quiet" }, ` ${decision.container}`) : null),
      h("span", { class: "decision-result" }, result)),
    body);
  details.addEventListener("toggle", () => {
    if (details.open && !body.hasChildNodes()) show(body, decision);
  });
  return h("li", { "data-decision": decision.number }, details);
}

async function show(body, decision) {
  body.append(
    h("p", {}, decision.explanation),
    h("p", { class: "quiet" }, requestText(decision)),
  );
  const place = body.appendChild(h("p", { class: "quiet" }, "Reading the GPUs at that time"));
  try {
    const answer = await fetch(`api/v1/decisions?number=${decision.number}`);
    const [whole] = answer.ok ? (await answer.json()).decisions : [];
    if (!whole) throw new Error("the agent does not keep it any more");
    place.replaceWith(whole.candidates.length ? candidates(whole) : h("p", { class: "quiet" }, "It was decided without the GPUs."));
  } catch (error) {
    write(place, `The GPUs at that time cannot be shown: ${error.message}.`);
    body.closest("details").addEventListener("toggle", () => body.replaceChildren(), { once: true }); // then asks again
  }
}


function requestText(decision) {
  const { asked: request, policy } = decision;
  if (!request) return `Decided in a call for ${decision.resource}.`;
  const hint = request.hint.length ? `, hint ${format.gpuNames(request.hint)}` : "";
  const how = policy ? ` Placed by: ${policy}.` : "";
  const memory = request.memory_bytes ? ` and ${format.bytes(request.memory_bytes)}` : "";
  return `Requested: ${request.cores} GPU cores${memory}${hint}.${how}`;
}

function candidates(decision) {
  const rows = decision.candidates.map((one) => h("tr", { "data-chosen": one.is_chosen },
    h("th", { scope: "row" }, `GPU ${one.label}`),
    h("td", { "data-number": true }, `${one.free_cores}/100`),
    h("td", { "data-number": true }, format.bytesOf(one.free_memory_bytes, one.total_memory_bytes)),
    h("td", {}, one.is_chosen ? `✓ ${one.verdict}` : one.verdict)));
  return h("div", { class: "scrolling", tabindex: 0, role: "region", "aria-label": `The GPUs at the time of admission ${decision.number}` },
    h("table", { class: "candidates" },
      h("caption", {}, "The GPUs at that time"),
      h("thead", {}, h("tr", {}, ["GPU", "GPU cores free", "Memory free", "Verdict"].map((name, place) =>
        h("th", { scope: "col", "data-number": place === 1 || place === 2 }, name)))),
      h("tbody", {}, rows)));
}
