// Making and changing elements. Values only ever become text or attributes, never markup: names come from tenants.

const SVG = "http://www.w3.org/2000/svg";

/** An element with attributes and children; texts become text nodes, null and false are left out. */
export function h(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

/** The same for SVG. */
export function s(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else set(element, name, value);
  }
  const shown = children.flat().filter((child) => child !== null && child !== undefined && child !== false);
  element.append(...shown.map((child) => (typeof child === "string" ? straight(child) : child)));
  return element;
}

/** Without the marks that turn what follows around: a GPU's name must not make 400/0 of the 0/400 behind it. */
const straight = (text) => text.replace(/[\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]/g, "\ufffd");

/** Sets an attribute where it differs; null and false take it away. */
export function set(element, name, value) {
  if (value === null || value === undefined || value === false) {
    if (element.hasAttribute(name)) element.removeAttribute(name);
    return;
  }
  const text = value === true ? "" : String(value);
  if (element.getAttribute(name) !== text) element.setAttribute(name, text);
}

/** Sets the text where it differs. */
export function write(element, text) {
  const wanted = straight(String(text));
  if (element.textContent !== wanted) element.textContent = wanted;
}

/** Sets a custom property where it differs. */
export function vary(element, name, value) {
  const wanted = String(value);
  if (element.style.getPropertyValue(name) !== wanted) element.style.setProperty(name, wanted);
}

/** Puts exactly these children in this order, moving only those that stand elsewhere. The keyboard in one that goes is in the
 * next one then, or at the section's heading: else it would be back at the top of the page. */
export function arrange(parent, children) {
  const wanted = new Set(children);
  const left = [...parent.children];
  const held = left.findIndex((child) => !wanted.has(child) && child.contains(document.activeElement));
  const next = held < 0 ? null : [...left.slice(held), ...left.slice(0, held).reverse()].find((child) => wanted.has(child));
  for (const child of left) if (!wanted.has(child)) child.remove();
  let place = parent.firstElementChild;
  for (const child of children) {
    if (child === place) place = place.nextElementSibling;
    else parent.insertBefore(child, place);
  }
  if (held >= 0) (next?.querySelector("summary, a, button") ?? parent.closest("section")?.querySelector("h2"))?.focus();
}

export const byId = (id) => document.getElementById(id);

/** Keeps what is focused or jumped to clear of the part of the head that stays in place, however high it is. */
export function keepClear() {
  const heads = [...document.querySelectorAll(".top, .status")];
  const observer = new ResizeObserver(() => {
    const head = heads.find((one) => getComputedStyle(one).position === "sticky" && one.getClientRects().length);
    document.documentElement.style.scrollPaddingTop = `${Math.ceil(head?.offsetHeight ?? 0) + 8}px`;
  });
  for (const one of heads) observer.observe(one);
}
