// Counts by kind as plain bars: a table whose bars are only decoration.
import { compact, number } from "../../lib/format.js";
import { html } from "../../lib/html.js";
import { Line } from "../../lib/text.js";

/** `items`: [{name, count, share}] of `bars`; `meanings`: what a name means, for its title. `kind`: a class of the bars. */
export function BarList({ title, note, items, meanings = {}, kind = "", heading, empty }) {
  return html`<section class="card overview-card" aria-label=${title}>
    <header class="overview-head"><h2>${title} <span class="quiet small">${note}</span></h2></header>
    ${items.length === 0
      ? html`<p class="overview-none">${empty}</p>`
      : html`<div class="overview-scroll" tabindex="0" role="group" aria-label=${title}>
          <table class="overview-bars">
            <thead class="visually-hidden">
              <tr><th scope="col">${heading}</th><th scope="col">count</th><th scope="col">share of the largest</th></tr>
            </thead>
            <tbody>
              ${items.map(
                ({ name, count, share }) =>
                  html`<tr key=${name} title=${meanings[name] ?? ""}>
                    <th scope="row"><${Line} text=${name} length=${28} /></th>
                    <td class="number" title=${number(count)}>${compact(count)}</td>
                    <td class="overview-bar-cell" aria-hidden="true">
                      <span class=${`overview-bar ${kind}`} style=${{ width: `${Math.max(share * 100, 1)}%` }}></span>
                    </td>
                  </tr>`,
              )}
            </tbody>
          </table>
        </div>`}
  </section>`;
}
