// The switch between the theme of the system, light and dark.
import { html, useState } from "../lib/html.js";
import { chooseTheme, theme, THEMES } from "../lib/theme.js";

const SIGNS = {
  auto: html`<circle cx="8" cy="8" r="6" fill="none" stroke="currentColor" stroke-width="1.5" /><path d="M8 2a6 6 0 0 1 0 12z" fill="currentColor" />`,
  light: html`<circle cx="8" cy="8" r="3" fill="currentColor" /><path stroke="currentColor" stroke-width="1.5" stroke-linecap="round"
    d="M8 1v1.5M8 13.5V15M1 8h1.5M13.5 8H15M3.05 3.05l1.06 1.06M11.89 11.89l1.06 1.06M3.05 12.95l1.06-1.06M11.89 4.11l1.06-1.06" />`,
  dark: html`<path fill="currentColor" d="M13.5 9.8A6 6 0 0 1 6.2 2.5a6 6 0 1 0 7.3 7.3z" />`,
};
const NAMES = { auto: "Theme of the system", light: "Light theme", dark: "Dark theme" };

export function ThemeSwitch() {
  const [chosen, setChosen] = useState(theme());
  const choose = (name) => {
    chooseTheme(name);
    setChosen(name);
  };
  return html`<fieldset class="theme-switch"><legend class="visually-hidden">Theme</legend>
    ${THEMES.map((name) => html`<label key=${name} title=${NAMES[name]}>
      <input class="visually-hidden" type="radio" name="theme" value=${name} checked=${chosen === name} onChange=${() => choose(name)} aria-label=${NAMES[name]} />
      <svg viewBox="0 0 16 16" aria-hidden="true">${SIGNS[name]}</svg>
    </label>`)}
  </fieldset>`;
}
