"""The style sheet of report.html: system fonts, light and dark, from phones to wide screens, and print.

Series colours are distinguishable for the colour-blind (after Okabe and Ito 2008) and lines differ in dashes too.
"""

STYLE = """
:root { color-scheme: light dark; --page: #fbfaf8; --card: #fff; --ink: #1d2125; --soft: #5c646c; --line: #e3e0da;
  --accent: #0b62a8; --s0: #0b62a8; --s1: #c8500a; --s2: #0a7d5c; --s3: #8b3f86; --s4: #8a6d00; --s5: #4f5b66;
  --p1: #fcebb6; --p2: #fbd48a; --p3: #f6b45e; --p4: #ec9140;
  --good: #0a7d5c; --bad: #c23b22; --none: #8b949c; --slow: #8b3f86; --odd: #b08900; --warn: #fff3d6; --code: #f4f2ee; }
@media (prefers-color-scheme: dark) {
  :root { --page: #14171a; --card: #1c2024; --ink: #e8eaec; --soft: #a2abb3; --line: #333a41; --accent: #6cb4f0;
    --s0: #6cb4f0; --s1: #f39a5b; --s2: #4fcb9f; --s3: #d795d2; --s4: #dcc052; --s5: #b3bec8; --good: #4fcb9f;
    --p1: #352d16; --p2: #514016; --p3: #70500f; --p4: #955a0b;
    --bad: #f0806a; --none: #7d868e; --slow: #d795d2; --odd: #dcc052; --warn: #3a300f; --code: #15181b; } }
* { box-sizing: border-box; }
html { scroll-behavior: smooth; scroll-padding-top: 3.5rem; -webkit-text-size-adjust: 100%; }
body { margin: 0; background: var(--page); color: var(--ink); font: 16px/1.55 system-ui, -apple-system, "Segoe UI",
  Roboto, "Noto Sans", "DejaVu Sans", sans-serif; }
header, main, nav { max-width: 1180px; margin: 0 auto; padding: 0 clamp(14px, 3vw, 32px); }
header { padding-top: clamp(24px, 5vw, 56px); }
h1 { font-size: clamp(1.8rem, 5vw, 2.7rem); line-height: 1.15; letter-spacing: -.02em; margin: .1em 0 .4em;
  overflow-wrap: anywhere; }
h2 { font-size: 1.4rem; letter-spacing: -.01em; margin: 2.6rem 0 .9rem; }
h3 { font-size: 1.08rem; margin: 2rem 0 .4rem; }
h5 { font-size: .95rem; margin: 0 0 .5rem; }
a { color: var(--accent); }
.eyebrow { color: var(--soft); font-size: .86rem; margin: 0; }
.verdict { font-size: clamp(1.05rem, 2vw, 1.22rem); max-width: 66ch; margin: 0 0 1.4rem; text-wrap: pretty; }
.warning { background: var(--warn); border-radius: 8px; padding: .6rem .9rem; }
.hint, .note { color: var(--soft); font-size: .86rem; max-width: 90ch; }
.note { margin: .3rem 0 0; font-size: .78rem; line-height: 1.4; }
.cards { list-style: none; display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 210px), 1fr));
  gap: 14px; margin: 0 0 1rem; padding: 0; }
.cards li { background: var(--card); border: 1px solid var(--line); border-radius: 12px; padding: 14px 18px;
  display: flex; flex-direction: column; }
.cards li { border-top: 4px solid var(--c); }
.cards span { color: var(--soft); font-size: .9rem; }
.cards strong { font-size: 2.5rem; line-height: 1.2; font-weight: 650; letter-spacing: -.02em;
  font-variant-numeric: tabular-nums; }
.cards small { font-size: 1rem; font-weight: 400; letter-spacing: 0; color: var(--soft); }
nav { position: sticky; top: 0; z-index: 1; background: var(--page); display: flex; gap: 1.3rem; overflow-x: auto;
  padding-top: .6rem; padding-bottom: .6rem; border-bottom: 1px solid var(--line); font-size: .92rem; }
nav a { text-decoration: none; white-space: nowrap; }
nav a:hover { text-decoration: underline; }
.scroll { overflow-x: auto; margin: 0 0 1.2rem; background: var(--card); border: 1px solid var(--line);
  border-radius: 10px; }
table { border-collapse: collapse; width: 100%; font-size: .9rem; font-variant-numeric: tabular-nums; }
caption { text-align: left; padding: .7rem .7rem .2rem; color: var(--soft); font-size: .84rem; }
caption span { display: inline-block; position: sticky; left: .7rem; max-width: min(110ch, calc(100vw - 4rem)); }
th, td { padding: .42rem .7rem; text-align: left; vertical-align: top; overflow-wrap: break-word; }
thead th { font-weight: 600; color: var(--soft); font-size: .82rem; border-bottom: 1px solid var(--line);
  white-space: nowrap; }
tbody th { font-weight: 600; min-width: 8.5rem; }
tbody tr + tr > * { border-top: 1px solid var(--line); }
.number { text-align: right; white-space: nowrap; }
td { white-space: pre-wrap; }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 320px), 1fr)); gap: 14px; }
figure { margin: 0; background: var(--card); border: 1px solid var(--line); border-radius: 10px;
  padding: 12px 12px 10px; break-inside: avoid; min-width: 0; }
figcaption { font-weight: 600; font-size: .92rem; margin: 0 0 4px 2px; overflow-wrap: anywhere; }
figure > svg { display: block; width: 100%; height: auto; overflow: visible; }
.legend { list-style: none; display: flex; flex-wrap: wrap; gap: 2px 14px; margin: 0 0 4px 2px; padding: 0;
  font-size: .8rem; color: var(--soft); }
.swatch { width: auto; height: .65em; margin-right: 6px; }
svg text { font-size: 10.5px; fill: var(--soft); font-variant-numeric: tabular-nums; }
svg text.strong { fill: var(--ink); font-size: 11px; font-weight: 600; }
.grid { stroke: var(--line); stroke-width: 1; }
.mark { stroke: var(--soft); stroke-width: 1; stroke-dasharray: 2 3; }
.s0 { --c: var(--s0); } .s1 { --c: var(--s1); } .s2 { --c: var(--s2); }
.s3 { --c: var(--s3); } .s4 { --c: var(--s4); } .s5 { --c: var(--s5); }
.v-correct { --c: var(--good); } .v-incorrect { --c: var(--bad); } .v-no_answer { --c: var(--none); }
.v-timeout { --c: var(--slow); } .v-unscorable { --c: var(--odd); } .v-scored { --c: var(--s0); }
.line { fill: none; stroke: var(--c); stroke-width: 1.8; stroke-linejoin: round; stroke-linecap: round; }
.line.s1 { stroke-dasharray: 7 3.5; } .line.s2 { stroke-dasharray: 2 3.5; } .line.s3 { stroke-dasharray: 9 3 2 3; }
.band { fill: var(--c); opacity: .16; }
.whisker { stroke: var(--c); stroke-width: 1.2; opacity: .65; }
.dot { fill: var(--c); }
.hidden { fill: transparent; }
.split { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 320px), 1fr)); gap: 14px;
  align-items: start; }
.beside { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 250px), 1fr)); gap: 12px; }
.beside > div { min-width: 0; }
.facts { color: var(--soft); font-size: .82rem; }
.badge { display: inline-block; border: 1px solid var(--c); color: var(--c); border-radius: 99px; padding: 0 .6em;
  font-size: .8rem; font-weight: 600; margin-right: .3em; }
pre, code { font: .86rem/1.5 ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace; }
pre { margin: 0 0 .4rem; padding: .6rem .75rem; background: var(--code); border-radius: 8px; white-space: pre-wrap;
  overflow-wrap: anywhere; max-height: 22rem; overflow: auto; unicode-bidi: isolate; }
code { unicode-bidi: isolate; overflow-wrap: anywhere; }
.filters { display: flex; flex-wrap: wrap; align-items: end; gap: 8px 14px; margin: 0 0 .7rem; font-size: .84rem;
  color: var(--soft); }
.filters label { display: grid; gap: 2px; }
.filters label:first-child { flex: 1 1 12rem; max-width: 22rem; }
.filters input, .filters select, .filters button { font: inherit; font-size: .9rem; color: var(--ink);
  background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: 0 .6rem; height: 2.2rem;
  min-width: 0; }
.filters select { max-width: 14rem; }
.filters button { cursor: pointer; }
.filters output { flex: 1 0 100%; font-variant-numeric: tabular-nums; }
[hidden] { display: none !important; }
.rows { max-height: min(75vh, 46rem); overflow: auto; border: 1px solid var(--line); border-radius: 10px;
  background: var(--card); margin: 0 0 1.6rem; }
.rows details { margin: 0; border: 0; border-radius: 0; background: none; }
.rows details + details { border-top: 1px solid var(--line); }
.rows summary { font-weight: 400; padding: .45rem 0; overflow-wrap: anywhere; }
.rows summary .facts { margin-left: .6rem; }
.rows [data-policy] { display: grid; grid-template-columns: minmax(0, 1fr); gap: .7rem; align-content: start; }
.rows p { font-size: .92rem; margin: .2rem 0 .6rem; }
.rows h5 { margin: .2rem 0 -.3rem; }
.rows p.facts { font-size: .82rem; margin: 0 0 .25rem; }
.wide { grid-column: 1 / -1; }
.tokens { white-space: pre-wrap; }
.p1 { background: var(--p1); } .p2 { background: var(--p2); } .p3 { background: var(--p3); }
.p4 { background: var(--p4); text-decoration: underline 2px; text-underline-offset: 3px; }
.p1, .p2, .p3, .p4 { border-radius: 2px; box-decoration-break: clone; -webkit-box-decoration-break: clone; }
.special { color: var(--soft); border: 1px dotted var(--soft); border-radius: 3px; font-size: .85em; padding: 0 .2em; }
.scale { color: var(--ink); gap: 4px 10px; align-items: center; }
.scale span { padding: .1em .45em; }
.scale .p0 { border: 1px solid var(--line); border-radius: 3px; }
.empty { color: var(--soft); font-style: italic; }
.escape { color: var(--bad); border: 1px solid var(--bad); border-radius: 3px; padding: 0 .15em; font-size: .9em; }
details { background: var(--card); border: 1px solid var(--line); border-radius: 10px; margin: 14px 0;
  padding: 0 14px; }
summary { cursor: pointer; padding: .6rem 0; font-weight: 600; font-size: .93rem; }
details[open] { padding-bottom: 14px; }
details .scroll, details figure { background: none; }
main { padding-bottom: 4rem; }
:focus-visible { outline: 2px solid var(--accent); outline-offset: 2px; }
@media (max-width: 480px) { th, td { padding: .4rem .6rem; } h2 { margin-top: 2rem; } }
@media print { nav, .filters { display: none; } body { background: #fff; } pre, .rows { max-height: none; } }
@media (prefers-reduced-motion: reduce) { html { scroll-behavior: auto; } }
"""
