// The options of an export, as the reader chooses them. Each change is in the address at once.
import { html } from "../../../lib/html.js";
import { inWords } from "../../../lib/words.js";
import { routeOption, shownOptions, valueOf, withOption } from "./samples_options.js";

/** `onChange(query)`: the query with the change. `routes`: of the session, if it has any. */
export function SamplesForm({ query, onChange, routes }) {
  const route = routeOption(routes);
  const options = route ? [route, ...shownOptions(query)] : shownOptions(query);
  return html`<form class="samples-form" aria-label="Options of the export" onSubmit=${(event) => event.preventDefault()}>
    ${options.map((option) => html`<${Option} key=${option.name} option=${option} query=${query} onChange=${onChange} />`)}
  </form>`;
}

function Option({ option, query, onChange }) {
  const value = valueOf(option, query);
  const changed = (event) => onChange(withOption(option, query, event.target.value));
  return html`<label>
    <span class="quiet small">${option.label}</span>
    ${option.values
      ? html`<select value=${value} onChange=${changed}>
          ${option.values.map((each) => html`<option value=${each} selected=${each === value}>${option.words?.[each] ?? (option.name === "route" ? each : inWords(each))}</option>`)}
        </select>`
      : html`<input type="number" min="1" max="1048576" value=${value} onChange=${changed} />`}
  </label>`;
}
