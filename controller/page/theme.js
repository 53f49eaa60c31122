// Light or dark: as the system says, or as the button was told.
import { find, say } from "./dom.js";

const THEMES = ["auto", "light", "dark"];
const dark = matchMedia("(prefers-color-scheme: dark)");

function kept() {
  let name = null;
  try { name = localStorage.getItem("theme"); } catch { /* no storage: as the system */ }
  return THEMES.includes(name) ? name : "auto";
}

function use(name) {
  document.documentElement.dataset.theme = name === "auto" ? (dark.matches ? "dark" : "light") : name;
  say(find("theme"), `◐ ${name}`);
  find("theme").setAttribute("aria-label", `Colours: ${name === "auto" ? "as the system" : name}`);
  dispatchEvent(new Event("themechange"));
}

function next() {
  const name = THEMES[(THEMES.indexOf(kept()) + 1) % THEMES.length];
  try { localStorage.setItem("theme", name); } catch { /* it holds until the page is left */ }
  use(name);
}

export function followTheme() {
  use(kept());
  dark.addEventListener("change", () => use(kept()));
  find("theme").addEventListener("click", next);
}

export const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
