// Hides and shows what is on the page already, and never makes markup. The page's Content-Security-Policy allows exactly
// these bytes, by their hash; nothing is ever put into them. Without them all is visible and only the filters are missing.
"use strict";
for (const root of document.querySelectorAll("[data-listing]")) {
  const rows = Array.from(root.querySelectorAll("[data-row]"));
  const texts = rows.map(row => Array.from(row.querySelectorAll("[data-prompt]"), e => e.textContent).join(" ")
    .toLowerCase());
  const control = name => root.querySelector("[data-control=" + name + "]");
  const value = name => control(name) ? control(name).value : "";
  const update = () => {
    const verdict = value("verdict"), policy = value("policy"), words = value("words").trim().toLowerCase();
    let problems = 0, completions = 0;
    rows.forEach((row, i) => {
      let left = 0;
      for (const cell of row.querySelectorAll("[data-policy]")) {
        let here = 0;
        for (const sample of cell.querySelectorAll("[data-verdict]")) {
          sample.hidden = (verdict && sample.dataset.verdict !== verdict) || (policy && cell.dataset.policy !== policy);
          if (!sample.hidden) here += 1;
        }
        cell.hidden = here === 0;
        left += here;
      }
      row.hidden = left === 0 || !texts[i].includes(words);
      if (!row.hidden) { problems += 1; completions += left; }
    });
    control("count").textContent = problems + " of " + rows.length + " problems, " + completions + " "
      + root.dataset.listing;
  };
  const unfold = open => { for (const row of rows) if (!row.hidden) row.open = open; };
  for (const name of ["verdict", "policy", "words"]) if (control(name)) control(name).addEventListener("input", update);
  control("open").addEventListener("click", () => unfold(true));
  control("close").addEventListener("click", () => unfold(false));
  control("bar").hidden = false;
  update();
}
