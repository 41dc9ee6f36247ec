"""The look of a report's page: one style sheet, no script, no font or image from elsewhere."""

CSS = """
:root { --ink: #1d2129; --soft: #5b6370; --line: #e3e6eb; --ground: #f6f7f9; --card: #ffffff; --accent: #c2410c;
  --good: #0f7b4d; --good-bg: #e2f4ea; --bad: #b3261e; --bad-bg: #fbe6e4; --none: #5b6370; --none-bg: #eceef2;
  --bar: #cfe0f3; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e8ec; --soft: #a2a9b4; --line: #353b45; --ground: #16191e;
  --card: #1f242b; --accent: #fb923c; --good: #6fd6a3; --good-bg: #17382a; --bad: #ff9c94; --bad-bg: #46201d;
  --none: #b3bac5; --none-bg: #2e343d; --bar: #27415e; } }
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; scroll-behavior: smooth; }
body { margin: 0; background: var(--ground); color: var(--ink); line-height: 1.5; font-size: 15px;
  font-family: system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", "Liberation Sans", Arial, sans-serif; }
main, header > div { max-width: 1080px; margin: 0 auto; padding: 0 24px; }
header { background: var(--card); border-bottom: 1px solid var(--line); padding: 30px 0 0; }
.eyebrow { color: var(--accent); font-weight: 600; letter-spacing: .02em; margin: 0; }
h1 { font-size: clamp(20px, 5vw, 30px); line-height: 1.2; margin: 4px 0 6px; overflow-wrap: break-word; }
header p { color: var(--soft); margin: 0; overflow-wrap: break-word; }
header p.headline { color: var(--ink); font-size: 17px; margin-bottom: 4px; }
.banner { background: var(--bad-bg); color: var(--bad); border-radius: 10px; padding: 10px 18px; margin: 20px 0 0; }
nav { display: flex; flex-wrap: wrap; gap: 4px 20px; padding: 16px 0 12px; }
nav a { color: var(--ink); text-decoration: none; border-bottom: 2px solid transparent; padding-bottom: 3px; }
nav a:hover { border-color: var(--accent); }
section { background: var(--card); border: 1px solid var(--line); border-radius: 10px;
  padding: 22px 24px; margin: 20px 0; }
h2 { font-size: 20px; margin: 0 0 4px; }
h3 { font-size: 15px; margin: 22px 0 6px; }
.lead { color: var(--soft); margin: 0 0 14px; max-width: 78ch; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(215px, 1fr)); gap: 14px; margin: 20px 0; }
.tile { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 14px 18px; }
.tile .what { color: var(--soft); font-size: 13px; }
.tile .big { font-size: 30px; font-weight: 650; line-height: 1.25; font-variant-numeric: tabular-nums; }
.tile .beside { color: var(--soft); font-size: 13px; font-variant-numeric: tabular-nums; }
.chip { display: inline-block; border-radius: 999px; padding: 1px 9px; font-size: 12px; white-space: nowrap;
  color: var(--none); background: var(--none-bg); }
.chip.better { color: var(--good); background: var(--good-bg); }
.chip.worse { color: var(--bad); background: var(--bad-bg); }
.wide { overflow-x: auto; margin-top: 14px; }
table { border-collapse: collapse; width: 100%; font-size: 14px; font-variant-numeric: tabular-nums; }
th, td { padding: 6px 10px; border-bottom: 1px solid var(--line); text-align: right; vertical-align: baseline; }
th { color: var(--soft); font-weight: 600; font-size: 13px; overflow-wrap: break-word; min-width: 9ch; }
th:first-child, td:first-child { text-align: left; padding-left: 0; white-space: nowrap; }
tr.group td { font-weight: 600; padding-top: 14px; border-bottom-color: var(--soft); }
tr:last-child td { border-bottom: 0; }
td .low { display: block; color: var(--soft); font-size: 12px; line-height: 1.3; white-space: nowrap; }
td.bar { background: linear-gradient(var(--bar), var(--bar)) 10px bottom /
  calc((100% - 20px) * var(--v)) 4px no-repeat; }
ul { margin: 8px 0 0; padding-left: 20px; max-width: 88ch; }
li { margin: 3px 0; overflow-wrap: anywhere; }
figure { margin: 18px 0 6px; background: #fff; border-radius: 8px; padding: 8px; border: 1px solid var(--line); }
figure img { display: block; width: 100%; height: auto; margin: 0 auto; }
figcaption { color: #5b6370; font-size: 13px; padding: 6px 4px 2px; }
.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(330px, 1fr)); gap: 14px; }
.pair figure { margin: 8px 0; }
details { margin-top: 14px; }
summary { cursor: pointer; color: var(--accent); font-weight: 600; }
pre { background: var(--ground); border: 1px solid var(--line); border-radius: 8px; padding: 10px 12px;
  margin: 6px 0 14px; white-space: pre-wrap; overflow-wrap: anywhere;
  font: 13px/1.45 ui-monospace, "SFMono-Regular", Menlo, Consolas, "DejaVu Sans Mono", monospace; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 3px 18px; margin: 8px 0; font-size: 14px; }
dt { color: var(--soft); } dd { margin: 0; overflow-wrap: anywhere; }
footer { color: var(--soft); font-size: 13px; padding: 6px 0 40px; }
@media print { body { background: #fff; } section, .tile { break-inside: avoid; } nav { display: none; } }
"""
