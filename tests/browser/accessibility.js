// Looks at the page as it is drawn. Each function returns a list of what is wrong, as texts; empty is good.

const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });

/** Any CSS colour as [red, green, blue, alpha]. */
function rgba(colour) {
  canvas.clearRect(0, 0, 1, 1);
  canvas.fillStyle = colour;
  canvas.fillRect(0, 0, 1, 1);
  const [red, green, blue, alpha] = canvas.getImageData(0, 0, 1, 1).data;
  return [red, green, blue, alpha / 255];
}

function over(top, below) {
  const [r, g, b, a] = top;
  return [r * a + below[0] * (1 - a), g * a + below[1] * (1 - a), b * a + below[2] * (1 - a), 1];
}

function luminance([red, green, blue]) {
  const [r, g, b] = [red, green, blue].map((value) => {
    const part = value / 255;
    return part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
  });
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
}

function ratio(one, two) {
  const [high, low] = [luminance(one), luminance(two)].sort((a, b) => b - a);
  return (high + 0.05) / (low + 0.05);
}

/** What an element stands on: the backgrounds of it and its ancestors, one over the other. */
function ground(element) {
  const layers = [];
  for (let one = element; one; one = one.parentElement) layers.push(rgba(getComputedStyle(one).backgroundColor));
  return layers.reverse().reduce((below, top) => over(top, below), [255, 255, 255, 1]);
}

function isSeen(element) {
  if (!element.checkVisibility({ opacityProperty: true, visibilityProperty: true, contentVisibilityAuto: true })) return false;
  if (element.closest(".unseen, .skip")) return false;
  const { width, height } = element.getBoundingClientRect();
  return width > 0 && height > 0;
}

/** Everything that a text in this element may stand on. */
function grounds(element) {
  const svg = element.closest("svg text");
  if (svg) {
    const rect = svg.parentElement.querySelector("rect");
    return [rect ? over(rgba(getComputedStyle(rect).fill), ground(svg.ownerSVGElement)) : ground(svg.ownerSVGElement)];
  }
  const share = element.closest(".share");
  if (share) return [ground(share), over(rgba(getComputedStyle(share.querySelector(".fill")).backgroundColor), ground(share))];
  return [ground(element)];
}

window.lowContrast = function () {
  const found = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  let count = 0;
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    if (!walker.currentNode.data.trim() || !isSeen(element)) continue;
    count += 1;
    const style = getComputedStyle(element);
    const colour = rgba(element.closest("svg") ? style.fill : style.color);
    for (const below of grounds(element)) {
      const got = ratio(over(colour, below), below);
      if (got < 4.5) found.push(`${got.toFixed(2)}: ${walker.currentNode.data.trim().slice(0, 30)} in ${nameOf(element)}`);
    }
  }
  const filter = document.querySelector("#filter");
  const placeholder = ratio(rgba(getComputedStyle(filter, "::placeholder").color), ground(filter));
  if (placeholder < 4.5) found.push(`${placeholder.toFixed(2)}: the filter's placeholder`);
  if (count < 100) found.push(`only ${count} texts were looked at`);
  return [...new Set(found)];
};

/** Edges and marks that carry a meaning, against what they stand on: 3 to 1. */
window.faintMarks = function () {
  const found = [];
  const check = (what, mark, below) => {
    const got = ratio(over(rgba(mark), below), below);
    if (got < 3) found.push(`${got.toFixed(2)}: ${what}`);
  };
  const variable = (element, name) => {
    const probe = element.appendChild(document.createElement("i"));
    probe.style.color = `var(${name})`;
    const value = getComputedStyle(probe).color;
    probe.remove();
    return value;
  };
  for (const share of document.querySelectorAll(".share:not(.other)")) {
    const strong = variable(share, "--strong");
    check(`edge of ${share.className} on the bar`, strong, ground(share.parentElement));
    check(`edge of ${share.className} on its own soft colour`, strong, ground(share));
  }
  for (const meter of document.querySelectorAll(".meter")) check("a meter's fill on its ground", variable(meter, "--strong"), ground(meter));
  const page = document.body;
  for (const name of ["--edge", "--accent", "--second", "--good", "--warn", "--bad", "--focus"]) {
    check(`${name} on the page`, variable(page, name), ground(page));
    check(`${name} on a panel`, variable(page, name), ground(document.querySelector(".panel")));
  }
  return [...new Set(found)];
};

window.unlabelled = function () {
  const found = [];
  const ids = [...document.querySelectorAll("[id]")].map((element) => element.id);
  for (const id of ids) if (ids.filter((one) => one === id).length > 1) found.push(`the id ${id} is there twice`);
  for (const element of document.querySelectorAll("[aria-labelledby]")) {
    const label = document.getElementById(element.getAttribute("aria-labelledby"));
    if (!label || !label.textContent.trim()) found.push(`${nameOf(element)} is labelled by nothing`);
  }
  for (const table of document.querySelectorAll("table")) if (!table.caption?.textContent.trim()) found.push(`${nameOf(table)} has no caption`);
  for (const heading of document.querySelectorAll("thead th")) if (heading.scope !== "col") found.push(`${nameOf(heading)} has no scope`);
  for (const meter of document.querySelectorAll("[role=meter]")) {
    for (const name of ["aria-valuenow", "aria-valuemin", "aria-valuemax", "aria-valuetext"]) {
      if (!meter.hasAttribute(name)) found.push(`a meter lacks ${name}`);
    }
  }
  const levels = [...document.querySelectorAll("h1, h2, h3, h4")].map((heading) => Number(heading.tagName[1]));
  levels.forEach((level, place) => {
    if (level > (levels[place - 1] ?? 0) + 1) found.push(`heading ${place} jumps to level ${level}`);
  });
  if (!document.documentElement.lang) found.push("the page has no language");
  if (!document.title.trim()) found.push("the page has no title");
  for (const landmark of ["header", "main", "footer"]) if (!document.querySelector(`body > ${landmark}`)) found.push(`no ${landmark}`);
  return [...new Set(found)];
};

/** Landmarks of one role with one name, of which nobody can tell which is which (axe: landmark-unique). */
window.landmarks = function () {
  const ofBody = new Map([["HEADER", "banner"], ["FOOTER", "contentinfo"]]);
  const roles = new Map([["MAIN", "main"], ["NAV", "navigation"], ["ASIDE", "complementary"]]);
  const isNamed = (one) => one.hasAttribute("aria-label") || one.hasAttribute("aria-labelledby");
  const found = [...document.querySelectorAll("header, footer, main, nav, aside, section, form, [role=region], [role=search]")].flatMap((one) => {
    if (!one.checkVisibility()) return [];
    const named = isNamed(one) ? { SECTION: "region", FORM: "form" }[one.tagName] : null;
    const role = one.getAttribute("role") ?? named ?? roles.get(one.tagName) ?? (one.parentElement === document.body ? ofBody.get(one.tagName) : null);
    if (!role) return [];
    const name = one.getAttribute("aria-label") ?? document.getElementById(one.getAttribute("aria-labelledby"))?.textContent ?? "";
    return [`${role} ${name.trim()}`];
  });
  return [...found.filter((one, place) => found.indexOf(one) !== place), ...(found.length < 5 ? [`only ${found.length} landmarks`] : [])];
};

/** All that the keyboard must reach, in the order of the page; of radio buttons only the chosen one is a stop, and of the rows'
 * buttons, among which arrow keys go, one. */
window.stops = function () {
  const all = [...document.querySelectorAll("a[href], button, input, summary, [tabindex='0']")];
  return all.filter((one) => one.checkVisibility() && one.tabIndex >= 0 && !(one.type === "radio" && !one.checked)).map(nameOf);
};

window.nameOf = nameOf;

function nameOf(element) {
  const parts = [];
  for (let one = element; one && one !== document.body && parts.length < 8; one = one.parentElement) {
    const place = one.parentElement ? [...one.parentElement.children].indexOf(one) : 0;
    parts.unshift(one.id ? `#${one.id}` : `${one.tagName.toLowerCase()}:${place}`);
    if (one.id) break;
  }
  return parts.join(" ");
}
