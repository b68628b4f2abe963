// Renews the page of a run under way: loads it again when the next one is due, until the page is one that does not ask
// for it. A page that was due long ago is of a run that was killed: it says so, and is left as it is.
"use strict";
const page = document.body.dataset, every = 1000 * Number(page.every);
const isOld = Date.now() - 1000 * Number(page.written) > 3 * every + 60000;
document.querySelector("[data-control=stale]").hidden = !isOld;
if (!isOld) setTimeout(() => location.reload(), every);
