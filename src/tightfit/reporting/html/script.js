"use strict";
// Draws the page's charts from the facts in it. Runs are numbered from 0 here, from 1 for people.

const facts = JSON.parse(document.getElementById("facts").textContent);
const { strings, held, phases, ops, runs, lives } = facts;
const lastRun = Math.max(0, runs.op.length - 1);
const byId = (id) => document.getElementById(id);

// -- words -------------------------------------------------------------------------------------

function bytes(size) {
  for (const [unit, factor] of [["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]]) {
    if (Math.abs(size) >= factor) return `${(size / factor).toFixed(2)} ${unit}`;
  }
  return `${size} B`;
}

function seconds(time) {
  if (time >= 1) return `${time.toFixed(2)} s`;
  return time >= 1e-3 ? `${(time * 1e3).toFixed(2)} ms` : `${(time * 1e6).toFixed(1)} us`;
}

const withoutZeros = (text) => text.replace(/\.0+ |(\.\d)0 /, "$1 ");

const percent = (fraction) => `${(100 * fraction).toFixed(2)} %`;

function nameOfOp(op) {
  if (op < 0) return "code outside the plan";
  const module = strings[ops.module[op]];
  return strings[ops.target[op]] + (module ? ` in ${module}` : "");
}

function phaseOf(run) {
  const phase = phases.find((p) => p.first <= run && run <= p.last);
  return phase ? phase.name : "";
}

const runsOfOp = new Map();
runs.op.forEach((op, run) => {
  if (op >= 0) runsOfOp.set(op, [...(runsOfOp.get(op) ?? []), run]);
});
const bornAt = new Map();
lives.first.forEach((run, life) => bornAt.set(run, [...(bornAt.get(run) ?? []), life]));

function describe(run) {
  const op = runs.op[run];
  const lines = [];
  if (op < 0) {
    lines.push(`Border: ${phaseOf(run)} begins`);
  } else {
    const way = runs.way[run] < 0 ? "" : `, as ${strings[runs.way[run]]}`;
    lines.push(nameOfOp(op) + way + (runs.again[run] ? ", computed again" : ""));
  }
  lines.push(`run ${run + 1} of ${runs.op.length}, ${phaseOf(run)}, ${seconds(runs.cost_s[run])}`);
  lines.push(`held ${bytes(runs.held_bytes[run])}; plain PyTorch ${bytes(runs.plain_bytes[run])}`);
  for (const life of (bornAt.get(run) ?? []).slice(0, 3)) {
    const until = lives.last[life] + 1;
    lines.push(`holds ${strings[lives.name[life]]}: ${bytes(lives.size_bytes[life])} until run ${until}`);
  }
  const times = op < 0 ? [] : runsOfOp.get(op);
  if (times.length > 1) {
    const later = times.slice(1, 4).map((other) => other + 1).join(", ");
    lines.push(`made at run ${times[0] + 1}, again at run ${later}${times.length > 4 ? ", ..." : ""}`);
  }
  return lines.join("\n");
}

function describeLife(life) {
  return [
    `${strings[lives.name[life]]}: ${bytes(lives.size_bytes[life])}`,
    `made by ${nameOfOp(lives.op[life])}`,
    `runs ${lives.first[life] + 1} to ${lives.last[life] + 1}, from byte ${lives.offset_bytes[life]}`,
  ].join("\n");
}

function tip(text) {
  const box = document.createElement("div");
  box.className = "tip";
  box.textContent = text;
  return box;
}

// -- looks -------------------------------------------------------------------------------------

function colours() {
  const style = getComputedStyle(document.documentElement);
  const of = (name) => style.getPropertyValue(`--${name}`).trim();
  const names = ["paper", "ink", "quiet", "line", "panel", "plan", "plain", "budget", "measured", "again"];
  return { ...Object.fromEntries(names.map((name) => [name, of(name)])), blocks: of("blocks").split(" ") };
}

function axis(look, more) {
  return {
    axisLine: { lineStyle: { color: look.line } },
    axisLabel: { color: look.quiet, hideOverlap: true },
    nameTextStyle: { color: look.quiet },
    splitLine: { lineStyle: { color: look.line, opacity: 0.6 } },
    ...more,
  };
}

function base(look) {
  return {
    animation: false,
    backgroundColor: "transparent",
    textStyle: { color: look.ink, fontFamily: "system-ui, sans-serif" },
    tooltip: {
      confine: true,
      transitionDuration: 0,
      backgroundColor: look.panel,
      borderColor: look.line,
      textStyle: { color: look.ink, fontSize: 13 },
    },
  };
}

// A slider below a chart; in it, pinching zooms and so does the wheel while Ctrl is pressed.
function zooming(look, filterMode, xAxisIndex) {
  return [
    { type: "inside", xAxisIndex, filterMode, zoomOnMouseWheel: "ctrl", moveOnMouseWheel: false },
    { type: "slider", xAxisIndex, filterMode, bottom: 8, height: 22, showDetail: false,
      borderColor: look.line, fillerColor: `${look.plan}33` },
  ];
}

// Gridlines at whole numbers of the unit in which the largest size is written.
function byteAxis(look, least, most, more) {
  const unit = [2 ** 30, 2 ** 20, 2 ** 10].find((factor) => most >= factor) ?? 1;
  const rough = (most - least) / unit / 4;
  const power = 10 ** Math.floor(Math.log10(Math.max(rough, 1e-9)));
  const step = [1, 2, 5, 10].find((digit) => digit * power >= rough) * power * unit;
  return axis(look, {
    type: "value", interval: step,
    min: Math.floor(least / step) * step, max: Math.ceil(most / step) * step,
    axisLabel: { color: look.quiet, hideOverlap: true, formatter: (size) => withoutZeros(bytes(size)) }, ...more,
  });
}

function runAxis(look, more) {
  return axis(look, {
    type: "value", min: 0, max: Math.max(1, lastRun), splitLine: { show: false }, minInterval: 1,
    axisLabel: { color: look.quiet, hideOverlap: true, formatter: (run) => `${Math.round(run) + 1}` },
    ...more,
  });
}

// -- charts ------------------------------------------------------------------------------------

const numbered = (column) => Array.from(column, (number, run) => [run, number]);

function memoryOption(look) {
  const narrow = byId("memory").clientWidth < 600;
  const measured = phases.filter((phase) => phase.measured_bytes !== null);
  const largest = Math.max(held.plain_peak_bytes, held.budget_bytes, held.peak_bytes);
  const line = (name, data, color, more) => (
    { name, type: "line", data, symbol: "none", itemStyle: { color }, lineStyle: { color, width: 1.5 }, ...more }
  );
  const level = (name, size, color) => line(name, [[0, size], [lastRun, size]], color, {
    lineStyle: { color, type: "dashed", width: 1.5 }, tooltip: { show: false },
  });
  const grid = { left: narrow ? 62 : 76, right: 16 };
  const series = [
    line("plan", numbered(runs.held_bytes), look.plan, {
      areaStyle: { color: look.plan, opacity: 0.12 }, z: 4,
    }),
    line("plain PyTorch", numbered(runs.plain_bytes), look.plain),
    level("budget", held.budget_bytes, look.budget),
    level("constants", held.constant_bytes, look.quiet),
    ...(measured.length ? [line("measured", measured.flatMap((phase) => [
      [phase.first, phase.measured_bytes], [phase.last, phase.measured_bytes], [phase.last, null],
    ]), look.measured, { lineStyle: { color: look.measured, width: 3 }, z: 5 })] : []),
  ];
  return {
    ...base(look),
    legend: { top: 0, left: 0, textStyle: { color: look.ink }, data: [...series.map((one) => one.name), "computed again"] },
    grid: [{ ...grid, top: narrow ? 64 : 40, bottom: "36%" }, { ...grid, top: "70%", bottom: 72 }],
    axisPointer: { link: [{ xAxisIndex: "all" }], lineStyle: { color: look.ink } },
    xAxis: [
      runAxis(look, { gridIndex: 0, axisLabel: { show: false } }),
      runAxis(look, { gridIndex: 1, name: "run of an op", nameLocation: "middle", nameGap: 26 }),
    ],
    yAxis: [
      byteAxis(look, 0, largest, { gridIndex: 0 }),
      axis(look, { gridIndex: 1, type: "value", splitNumber: 2,
        axisLabel: { color: look.quiet, formatter: (time) => (time ? withoutZeros(seconds(time)) : "0") } }),
    ],
    dataZoom: zooming(look, "none", [0, 1]),
    tooltip: {
      ...base(look).tooltip, trigger: "axis",
      formatter: (points) => tip(describe(Math.round(points[0].axisValue))),
    },
    series: [...series, times("time", 0, look.plain, 2), times("computed again", 1, look.again, 3)],
  };
}

// Bars of the runs that are, or are not, computed again.
function times(name, again, color, z) {
  return {
    name, type: "bar", xAxisIndex: 1, yAxisIndex: 1, z, itemStyle: { color },
    barMinWidth: 1, barCategoryGap: 0, barGap: "-100%",
    data: numbered(runs.cost_s).filter(([run]) => runs.again[run] === again),
  };
}

function layoutOption(look) {
  const height = lives.offset_bytes.reduce(
    (tallest, offset, life) => Math.max(tallest, offset + lives.size_bytes[life]), 1,
  );
  return {
    ...base(look),
    tooltip: { ...base(look).tooltip, formatter: (point) => tip(describeLife(point.dataIndex)) },
    grid: { left: 76, right: 16, top: 16, bottom: 76 },
    xAxis: runAxis(look, { name: "run of an op", nameLocation: "middle", nameGap: 26, max: lastRun + 1 }),
    yAxis: byteAxis(look, 0, height),
    dataZoom: zooming(look, "weakFilter", [0]),
    series: [{
      type: "custom", clip: true, encode: { x: [0, 1], y: [2, 3] },
      data: lives.first.map((first, life) => [
        first, lives.last[life] + 1, lives.offset_bytes[life], lives.offset_bytes[life] + lives.size_bytes[life],
      ]),
      renderItem: (item, api) => {
        const [left, top] = api.coord([api.value(0), api.value(3)]);
        const [right, bottom] = api.coord([api.value(1), api.value(2)]);
        const fill = look.blocks[item.dataIndex % look.blocks.length];
        return {
          type: "rect", shape: { x: left, y: top, width: Math.max(1, right - left), height: Math.max(0.5, bottom - top) },
          style: { fill, opacity: 0.85, stroke: look.paper, lineWidth: right - left > 3 && bottom - top > 3 ? 0.5 : 0 },
        };
      },
    }],
  };
}

function sharesOption(look) {
  const rows = [...document.querySelectorAll("#share-rows tbody tr")].reverse();
  const saved = rows.map((row) => Number(row.dataset.saved));
  return {
    ...base(look),
    grid: { left: 8, right: 76, top: 8, bottom: 8, containLabel: true },
    tooltip: { show: false },
    xAxis: byteAxis(look, Math.min(0, ...saved), Math.max(1, ...saved), { show: false }),
    yAxis: axis(look, {
      type: "category", data: rows.map((row) => row.cells[0].textContent),
      axisLabel: { color: look.ink, width: 180, overflow: "truncate" },
    }),
    series: [{
      type: "bar", data: saved, itemStyle: { color: look.plan },
      label: { show: true, position: "right", color: look.ink, formatter: (bar) => bytes(bar.value) },
    }],
  };
}

function curveOption(look) {
  const narrow = byId("curve").clientWidth < 600;
  const points = facts.curve;
  const dots = (key) => points.filter((p) => p[key] !== null).map((p) => [p.budget_bytes, p[key]]);
  const plain = [held.plain_peak_bytes, 0];
  const budgets = [...points.map((p) => p.budget_bytes), plain[0]];
  return {
    ...base(look),
    legend: { top: 0, left: 0, textStyle: { color: look.ink } },
    grid: { left: 60, right: 36, top: narrow ? 64 : 44, bottom: 48 },
    tooltip: {
      ...base(look).tooltip,
      formatter: (p) => tip(`${p.seriesName}\n${bytes(p.value[0])}: ${percent(p.value[1])}`),
    },
    xAxis: byteAxis(look, Math.min(...budgets), Math.max(...budgets), {
      name: "budget, constants included", nameLocation: "middle", nameGap: 28, splitLine: { show: false },
    }),
    yAxis: axis(look, { type: "value", axisLabel: { color: look.quiet, formatter: (part) => `${(100 * part).toFixed(0)} %` } }),
    series: [
      { name: "proven least", type: "line", data: dots("bound"), symbolSize: 6, itemStyle: { color: look.quiet },
        lineStyle: { color: look.quiet, type: "dashed" }, areaStyle: { color: look.quiet, opacity: 0.12 } },
      { name: "plans", type: "line", data: dots("overhead"), symbolSize: 7, itemStyle: { color: look.plan } },
      { name: "this plan", type: "scatter", symbol: "diamond", symbolSize: 16, itemStyle: { color: look.again },
        data: points.filter((p) => p.budget_bytes === held.budget_bytes).map((p) => [p.budget_bytes, p.overhead]), z: 5 },
      { name: "plain PyTorch", type: "scatter", symbolSize: 11, data: [plain], itemStyle: { color: look.plain }, z: 5 },
    ],
  };
}

// -- what the reader does ----------------------------------------------------------------------

const options = { memory: memoryOption, layout: layoutOption, shares: sharesOption, curve: curveOption };
const charts = Object.fromEntries(
  Object.keys(options).filter(byId).map((id) => [id, echarts.init(byId(id))]),
);

function drawAll() {
  const look = colours();
  for (const [id, chart] of Object.entries(charts)) chart.setOption(options[id](look), { notMerge: true });
}

function showInstant() {
  const run = Number(byId("run").value);
  byId("instant").textContent = runs.op.length ? describe(run) : "An empty plan.";
  const alive = [];
  for (let life = 0; life < lives.first.length; life++) {
    if (lives.first[life] <= run && run <= lives.last[life]) alive.push(life);
  }
  alive.sort((one, other) => lives.size_bytes[other] - lives.size_bytes[one]);
  const rows = alive.slice(0, 12).map((life) => [
    strings[lives.name[life]], nameOfOp(lives.op[life]), lives.first[life] + 1, lives.last[life] + 1,
    bytes(lives.size_bytes[life]),
  ]);
  const rest = alive.slice(12).reduce((sum, life) => sum + lives.size_bytes[life], 0);
  if (rest) rows.push([`${alive.length - 12} others`, "", "", "", bytes(rest)]);
  rows.push(["constants", "parameters, buffers, inputs, optimizer", "", "", bytes(held.constant_bytes)]);
  const body = byId("held").tBodies[0];
  body.replaceChildren(...rows.map((cells) => {
    const row = document.createElement("tr");
    cells.forEach((cell, column) => {
      const box = row.insertCell();
      box.textContent = cell;
      if (column === 4) box.className = "number";
    });
    return row;
  }));
  placeMark();
}

// A line of its own: drawing the whole chart again at every move of the slider would lag.
const mark = document.createElement("div");
mark.className = "mark";
byId("memory").append(mark);

function placeMark() {
  const run = Number(byId("run").value);
  const [window] = charts.memory.getOption().dataZoom;
  mark.hidden = run < window.startValue || run > window.endValue;
  if (!mark.hidden) mark.style.left = `${charts.memory.convertToPixel({ xAxisIndex: 0 }, run)}px`;
}

function goTo(run) {
  byId("run").value = String(run);
  showInstant();
}

function zoom(part) {
  const centre = 100 * Number(byId("run").value) / Math.max(1, lastRun);
  const [window] = charts.memory.getOption().dataZoom;
  const width = part === 1 ? 100 : Math.max(0.2, (window.end - window.start) * part);
  const start = Math.min(Math.max(0, centre - width / 2), 100 - width);
  charts.memory.dispatchAction({ type: "dataZoom", start, end: start + width });
}

function isDark() {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}

function nameTheme() {
  byId("theme").textContent = isDark() ? "Light" : "Dark";
}

byId("theme").addEventListener("click", () => {
  document.documentElement.dataset.theme = isDark() ? "light" : "dark";
  nameTheme();
  drawAll();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { nameTheme(); drawAll(); });
let asked = 0;
byId("run").addEventListener("input", () => {
  cancelAnimationFrame(asked);
  asked = requestAnimationFrame(showInstant);
});
byId("peak").addEventListener("click", () => goTo(held.peak_run));
byId("again").addEventListener("click", () => {
  const from = Number(byId("run").value);
  const next = runs.again.indexOf(1, from + 1);
  const run = next < 0 ? runs.again.indexOf(1) : next;
  if (run >= 0) goTo(run);
});
byId("closer").addEventListener("click", () => zoom(0.4));
byId("whole").addEventListener("click", () => zoom(1));
charts.memory.getZr().on("click", (event) => {
  const [run] = charts.memory.convertFromPixel({ gridIndex: 0 }, [event.offsetX, event.offsetY]) ?? [];
  if (run >= 0 && run <= lastRun) goTo(Math.round(run));
});
charts.memory.on("dataZoom", placeMark);
new ResizeObserver(() => {
  Object.values(charts).forEach((chart) => chart.resize());
  placeMark();
}).observe(document.body);

nameTheme();
drawAll();
showInstant();
document.documentElement.dataset.ready = "true";
