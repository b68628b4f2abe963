// Reloads the page of a running run when the next one is due. The final page has no due time and is not reloaded.
// An overdue page, from a killed run, shows a warning and is not reloaded.
"use strict";
const page = document.body.dataset, every = 1000 * Number(page.every);
const isOld = Date.now() - 1000 * Number(page.written) > 3 * every + 60000;
document.querySelector("[data-control=stale]").hidden = !isOld;
if (!isOld) setTimeout(() => location.reload(), every);
