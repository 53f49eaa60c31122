// Elements, numbers and times.  Whatever comes from the sidecar is put in as text (textContent,
// attributes), never as markup.  A character that cannot be seen is shown by its number, so that none
// changes the order in which the words around it are read.

export const find = (id) => document.getElementById(id);

export function put(tag, given = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(given)) made.setAttribute(name, value);
  made.append(...children.map((child) => (typeof child === "string" ? visible(child) : child)));
  return made;
}

export function say(element, text) {
  const seen = visible(text);
  if (element.textContent !== seen) element.textContent = seen;
}

// Controls, marks of direction, and separators other than the space; what has no shape yet, too.
const UNSEEN = /[\p{C}\p{Zl}\p{Zp}]/gu;

function visible(text) {
  return String(text).replace(UNSEEN, (it) => `\\u{${it.codePointAt(0).toString(16)}}`);
}

export const number = (value, digits = 0) =>
  value === null || value === undefined
    ? "–"
    : value.toLocaleString(undefined, { minimumFractionDigits: digits, maximumFractionDigits: digits });

export const percent = (share, digits = 0) => (share === null || share === undefined ? "–" : `${number(100 * share, digits)} %`);

export const counted = (count, one, many) => `${number(count)} ${count === 1 ? one : many}`;

const TIME = new Intl.DateTimeFormat(undefined, { hour: "2-digit", minute: "2-digit", second: "2-digit", hourCycle: "h23" });
const DAY = new Intl.DateTimeFormat(undefined, { day: "numeric", month: "short", hour: "2-digit", minute: "2-digit", hourCycle: "h23" });

export const clock = (seconds) => TIME.format(new Date(seconds * 1000));

// The time of day, with the day if it is another one.
export function moment(seconds) {
  const date = new Date(seconds * 1000);
  return date.toDateString() === new Date().toDateString() ? clock(seconds) : DAY.format(date);
}

export function duration(seconds) {
  if (seconds < 90) return `${Math.max(0, Math.round(seconds))} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  return seconds < 129600 ? `${number(seconds / 3600, 1)} h` : `${Math.round(seconds / 86400)} days`;
}

// Boxes that may scroll tell so: they take the focus, and a line above them appears while there is
// more than what is seen.
export function markScrollers() {
  for (const box of document.querySelectorAll("[data-scrolls]")) {
    const sideways = box.scrollWidth > box.clientWidth + 1, down = box.scrollHeight > box.clientHeight + 1;
    const more = sideways || down;
    box.classList.toggle("more", more);
    if (more) box.tabIndex = 0;
    else box.removeAttribute("tabindex");
    const hint = box.previousElementSibling;
    if (hint?.classList.contains("scroll-hint")) {
      hint.hidden = !more;
      say(hint, sideways ? "↔ scrolls sideways" : "↕ scrolls");
    }
  }
}
