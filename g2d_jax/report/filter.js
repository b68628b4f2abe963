// Hides, shows and sorts the page's elements, and never creates markup. Without it only the controls are missing.
"use strict";
const change = row => Number(row.dataset.change);
const lengths = row => Array.from(row.querySelectorAll("[data-tokens]:not([hidden])"), e => Number(e.dataset.tokens));
// Sort keys of rows, ascending; unknown values (NaN) come last.
const keys = {
  changed: row => -Math.abs(change(row)),
  lost: change,
  gained: row => -change(row),
  shortest: row => Math.min(...lengths(row)),
  longest: row => -Math.max(...lengths(row)),
};
for (const root of document.querySelectorAll("[data-listing]")) {
  const rows = Array.from(root.querySelectorAll("[data-row]"));
  const list = root.querySelector("[data-rows]");
  const texts = rows.map(row => Array.from(row.querySelectorAll("[data-prompt]"), e => e.textContent).join(" "));
  const control = name => root.querySelector("[data-control=" + name + "]");
  const value = name => control(name) ? control(name).value : "";
  const arrange = () => {
    const key = keys[value("sort")] || (() => 0);
    const numbers = new Map(rows.map(row => [row, Number.isNaN(key(row)) ? Infinity : key(row)]));
    const sorted = rows.slice().sort((a, b) => numbers.get(a) - numbers.get(b) || 0);
    if (sorted.every((row, i) => list.children[i] === row)) return;
    list.append(...sorted);
    list.scrollTop = 0;
  };
  const update = () => {
    const verdict = value("verdict"), policy = value("policy"), words = value("words").trim().toLowerCase();
    let problems = 0, completions = 0;
    rows.forEach((row, i) => {
      let left = 0;
      for (const cell of row.querySelectorAll("[data-policy]")) {
        let here = 0;
        for (const sample of cell.querySelectorAll("[data-verdict]")) {
          sample.hidden = (verdict && sample.dataset.verdict !== verdict) || (policy && cell.dataset.policy !== policy);
          here += !sample.hidden;
        }
        cell.hidden = here === 0;
        left += here;
      }
      row.hidden = left === 0 || !texts[i].toLowerCase().includes(words);
      if (!row.hidden) { problems += 1; completions += left; }
    });
    control("count").textContent = problems + " of " + rows.length + " problems, " + completions + " completions";
    arrange();
  };
  const filters = ["verdict", "policy", "words"];
  const show = () => {
    const target = document.getElementById(location.hash.slice(1));
    if (rows.includes(target) && target.hidden) {
      for (const name of filters) if (control(name)) control(name).value = "";
      update();
    }
    for (let around = target; around; around = around.parentElement) if ("open" in around) around.open = true;
    if (target) target.scrollIntoView();
  };
  for (const name of [...filters, "sort"])
    if (control(name)) control(name).addEventListener("input", update);
  control("open").addEventListener("click", () => {
    const open = !rows.some(row => row.open);
    for (const row of rows) row.open = open;
  });
  control("bar").hidden = false;
  update();
  addEventListener("hashchange", show);
  show();
}
