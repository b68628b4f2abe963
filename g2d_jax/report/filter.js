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
        const samples = Array.from(cell.querySelectorAll("[data-verdict]"));
        for (const sample of samples)
          sample.hidden = (verdict && sample.dataset.verdict !== verdict) || (policy && cell.dataset.policy !== policy);
        const here = samples.filter(sample => !sample.hidden).length;
        cell.hidden = here === 0;
        left += here;
      }
      row.hidden = left === 0 || !texts[i].includes(words);
      if (!row.hidden) { problems += 1; completions += left; }
    });
    control("count").textContent = problems + " of " + rows.length + " problems, " + completions + " completions";
  };
  for (const name of ["verdict", "policy", "words"]) if (control(name)) control(name).addEventListener("input", update);
  for (const [name, open] of [["open", true], ["close", false]])
    control(name).addEventListener("click", () => { for (const row of rows) if (!row.hidden) row.open = open; });
  control("bar").hidden = false;
  update();
}
