"use strict";
// The live dashboard: polls for changes and shows them. Names and settings come from files and are only set as text.
(() => {
  const token = new URLSearchParams(location.search).get("token") ?? "";
  const { element, format } = Figures, $ = (id) => document.getElementById(id);
  const EVERY = 300, AT_FIRST = 12;
  const ask = async (path, values = []) => {
    const response = await fetch(`${path}?${new URLSearchParams([["token", token], ...values])}`, { cache: "no-store" });
    if (!response.ok) throw new Error((await response.text()).trim());
    return response;
  };

  const runs = new Map();
  const state = { revision: 0, sort: "name", down: false, shown: new Set(), touched: false };
  let plot = null;

  // ---- Reading --------------------------------------------------------------------------------------------------------------------------

  function take(news) {
    for (const { name, generation, settings, points, ...rest } of news.runs) {
      const run = runs.get(name) ?? runs.set(name, { name, settings: {}, curves: {} }).get(name);
      if (run.generation !== generation) run.curves = {};
      Object.assign(run, rest, { generation }, settings ? { settings } : {});
      for (const [curve, [x, y]] of Object.entries(points)) {
        const known = run.curves[curve] ??= { x: [], y: [] };
        for (let i = 0; i < x.length; i++) { known.x.push(x[i]); known.y.push(y[i]); }
        run.smoothed = null;
      }
    }
    // The names of all runs are sent if some were removed.
    if (news.names) {
      const known = new Set(news.names);
      for (const name of runs.keys()) if (!known.has(name)) { runs.delete(name); state.shown.delete(name); }
    }
    state.revision = news.revision;
  }

  async function poll() {
    try {
      const began = performance.now(), news = await (await ask("/news", [["since", state.revision]])).json();
      const before = [...runs.keys()].join("\n");
      take(news);
      if (news.runs.length || news.names) {
        if (!state.touched) state.shown = new Set([...runs.values()].slice(-AT_FIRST).map((run) => run.name));
        if ([...runs.keys()].join("\n") !== before || news.runs.some((run) => run.settings)) choices();
        rows();
        draw();
        document.body.dataset.drawn = String(performance.now() - began);
      }
      const going = [...runs.values()].filter((run) => run.status === "running").length;
      $("state").textContent = news.count ? `${news.count} runs, ${going} running.` : "No runs yet; start one with `termwise train`.";
      document.body.dataset.ready = "yes";
    } catch (error) {
      $("state").textContent = `No response: ${error.message}. Retrying.`;
    }
    setTimeout(poll, EVERY);
  }

  // ---- Curves ---------------------------------------------------------------------------------------------------------------------------

  /** Exponential moving average with bias correction. */
  function smooth({ x, y }, share) {
    if (!share) return { x, y };
    let sum = 0, weight = 0;
    return { x, y: y.map((value) => { sum = share * sum + (1 - share) * value; weight = share * weight + 1 - share; return sum / weight; }) };
  }

  function draw() {
    const by = $("colour").value, groups = new Map();
    const share = Number($("smooth").value), curve = $("curve").value;
    const series = [];
    for (const run of [...runs.values()].filter((run) => state.shown.has(run.name))) {
      const points = run.curves[curve];
      if (!points?.x.length) continue;
      const group = by ? run.settings[by] ?? "" : run.name;
      if (!groups.has(group)) groups.set(group, groups.size);
      const color = groups.get(group) % 9;
      series.push({ name: run.name, color, dashed: groups.get(group) >= 9, ...smooth(points, share) });
    }
    const spec = { title: "", x: { label: "step", log: false, unit: "number" }, y: { label: "", log: plot?.log ?? false, unit: "number" }, series, rules: [] };
    $("curve-label").textContent = `${$("curve").selectedOptions[0].text}, nats per token`;
    if (plot) plot.set(spec); else plot = new Figures.Plot($("plot"), spec, { label: "Curves of the selected runs" });
  }

  // ---- Table ----------------------------------------------------------------------------------------------------------------------------

  const last = (run, curve) => run.curves[curve]?.y.at(-1);
  const step = (run) => Math.max(0, ...Object.values(run.curves).map((points) => points.x.at(-1) ?? 0));
  const FIXED = { name: (run) => run.name, status: (run) => run.status, step, train: (run) => last(run, "train"), held_out: (run) => last(run, "held_out"), recall: (run) => last(run, "recall") };
  const COLUMNS = { name: "run", status: "status", step: "step", train: "loss", held_out: "held-out", recall: "recall" };
  const numeric = (text) => (text !== "" && Number.isFinite(Number(text)) ? Number(text) : text);
  const valueOf = (run, column) => (FIXED[column] ? FIXED[column](run) : run.settings[column] === undefined ? undefined : numeric(run.settings[column]));

  /** Settings in which runs differ. */
  function varied() {
    const values = new Map();
    for (const run of runs.values()) for (const [key, value] of Object.entries(run.settings)) (values.get(key) ?? values.set(key, new Set()).get(key)).add(value);
    return [...values].filter(([key, set]) => set.size > 1 && key !== "threads").map(([key]) => key);
  }

  function fits(run) {
    return $("filter").value.trim().split(/\s+/).filter(Boolean).every((word) => {
      const [, key, sign, wanted] = word.match(/^([\w-]+)(=|<|>)(.*)$/) ?? [];
      if (!key) return run.name.includes(word) || run.status === word;
      const found = valueOf(run, key.replaceAll("-", "_"));
      if (found === undefined) return false;
      if (sign === "=") return typeof found === "number" ? found === Number(wanted) : String(found).includes(wanted);
      return sign === "<" ? found < Number(wanted) : found > Number(wanted);
    });
  }

  function listed() {
    const column = state.sort;
    const list = [...runs.values()].filter(fits).sort((a, b) => {
      const [x, y] = [valueOf(a, column), valueOf(b, column)];
      if (x === undefined || y === undefined) return (x === undefined) - (y === undefined);
      return typeof x === "number" && typeof y === "number" ? x - y : String(x).localeCompare(String(y), undefined, { numeric: true });
    });
    return state.down ? list.reverse() : list;
  }

  function rows() {
    const some = (column) => [...runs.values()].some((run) => valueOf(run, column) !== undefined);
    const columns = [...Object.keys(COLUMNS).filter(some), ...varied()];
    const key = columns.join("\n") + state.sort + state.down;
    if (key !== rows.key) {
      rows.key = key;
      $("runs").tHead.replaceChildren(element("tr", {}, element("th", {}, element("span", { class: "said" }, "shown")), ...columns.map((column) => {
        const button = element("button", { type: "button" }, `${COLUMNS[column] ?? column}${state.sort === column ? (state.down ? " ↓" : " ↑") : ""}`);
        button.addEventListener("click", () => { state.down = state.sort === column && !state.down; state.sort = column; rows(); });
        return element("th", { "aria-sort": state.sort === column ? (state.down ? "descending" : "ascending") : "none" }, button);
      })));
    }
    const focused = document.activeElement?.closest?.("#runs tbody tr")?.dataset.run;
    $("runs").tBodies[0].replaceChildren(...listed().map((run) => {
      const box = element("input", { type: "checkbox", "aria-label": `show ${run.name}` });
      box.checked = state.shown.has(run.name);
      box.addEventListener("change", () => { state.touched = true; if (box.checked) state.shown.add(run.name); else state.shown.delete(run.name); draw(); });
      const row = element("tr", {}, element("td", {}, box), ...columns.map((column) => {
        const value = valueOf(run, column), of = column === "step" && run.steps ? ` of ${run.steps}` : "";
        const text = value === undefined ? "–" : typeof value === "number" ? (Number.isInteger(value) ? String(value) : format("number", value, 5)) + of : value;
        return element("td", typeof value === "number" ? { class: "number" } : { title: text }, text);
      }));
      row.dataset.run = run.name;
      return row;
    }));
    if (focused) [...$("runs").tBodies[0].rows].find((row) => row.dataset.run === focused)?.querySelector("input").focus();
  }

  function choices() {
    const chosen = $("colour").value, look = $("look-run").value;
    $("colour").replaceChildren(element("option", { value: "" }, "run"), ...varied().map((key) => element("option", { value: key }, key)));
    $("colour").value = chosen;
    $("look-run").replaceChildren(...[...runs.keys()].map((name) => element("option", { value: name }, name)));
    if (runs.has(look)) $("look-run").value = look;
  }

  // ---- Inside a model -------------------------------------------------------------------------------------------------------------------

  let query = 1 << 20, spectrum = null;
  async function look() {
    const run = $("look-run").value;
    if (!run) return;
    $("look-said").textContent = "Loading…";
    const values = [["run", run], ["layer", $("look-layer").value], ["head", $("look-head").value], ["order", $("look-order").value], ["query", query]];
    if ($("look-text").value) values.push(["text", $("look-text").value]);
    try {
      const { text, found } = await (await ask("/look", values)).json();
      $("look-text").value = text;
      show(found);
    } catch (error) {
      $("look-said").textContent = error.message;
      $("look-tokens").replaceChildren();
    }
  }

  function show({ model, tokens, layers, heads, look: seen }) {
    query = seen.query;
    $("look-layer").max = layers - 1;
    $("look-head").max = heads - 1;
    const most = Math.max(1e-12, ...seen.weights.concat(seen.cut_weights ?? []).map(Math.abs));
    const percent = (x) => format("percent", x, 3);
    $("look-tokens").replaceChildren(...tokens.map((token, s) => {
      const bar = (w) => { const made = element("i"); made.style.height = `${100 * Math.abs(w) / most}%`; return made; };
      // Keys after the selected position and, with a window, those before it.
      const both = (seen.weights[s] ?? null) === null ? [] : [seen.weights[s], ...(seen.cut_weights ? [seen.cut_weights[s]] : [])];
      const said = both.length ? both.map(percent).join(" and ") : "masked";
      const button = element("button", { type: "button", "aria-pressed": String(s === seen.query), title: said, "aria-label": `${token}: ${said}` },
        element("span", { class: "bars" }, ...both.map(bar)), element("span", { class: "text" }, token.trim() || "·"));
      button.addEventListener("click", () => { query = s; look(); });
      return element("li", {}, button);
    }));
    const { spectrum: found } = seen, orders = found.cut?.order_for;
    $("look-said").textContent = `Weights of position ${seen.query + 1}, layer ${$("look-layer").value}, head ${$("look-head").value}: dark ${seen.attention}${seen.cut ? `, blue ${seen.cut}` : ""}${seen.window === null ? "" : `; ${seen.weights.filter((w) => w === null).length} keys before its window are not seen`}.`;
    const fact = (name, text) => [element("dt", {}, name), element("dd", {}, text)];
    const list = element("dl", {}, ...fact("scores", `${format("number", found.scores.min, 3)} to ${format("number", found.scores.max, 3)}, mean ${format("number", found.scores.mean, 3)} ± ${format("number", found.scores.sd, 3)}`),
      ...(found.entropy ? fact("entropy", `${format("number", found.entropy.nats, 3)} nats`) : []),
      ...(orders ? fact("orders needed", `${orders.ten_percent ?? "more"} for 10 %, ${orders.one_percent ?? "more"} for 1 %, ${orders.tenth_percent ?? "more"} for 0.1 %`) : []),
      ...fact("cache of this head", format("bytes", seen.cache_bytes, 3)), ...fact(seen.window === null ? "state of these orders" : `memory of its ${seen.window} keys`, seen.state_bytes === null ? "none of finite size" : format("bytes", seen.state_bytes, 3)), ...fact("model", model));
    const { terms, cut } = found;
    $("look-error").hidden = !terms || !cut;
    if ($("look-error").hidden) list.append(...fact("spectrum", "none: the kernel has no Taylor series"));
    $("look-facts").replaceChildren(list);
    if ($("look-error").hidden) return;
    const finite = (list) => list.map((x) => (x === null ? NaN : x));
    const series = [{ name: "error of the truncated output", color: 1, x: seen.orders, y: finite(cut.error) }, { name: "fraction of the remaining weight", color: 2, dashed: true, x: seen.orders, y: finite(cut.share) }];
    const spec = { title: "Spectrum", x: { label: "highest order", log: false, unit: "number" }, y: { label: "", log: true, unit: "percent" }, series, rules: [] };
    if (spectrum) spectrum.set(spec); else spectrum = new Figures.Plot($("look-spectrum"), spec, { label: "Spectrum of the head" });
  }

  // ---- Controls -------------------------------------------------------------------------------------------------------------------------

  for (const id of ["curve", "smooth", "colour"]) $(id).addEventListener("input", draw);
  $("filter").addEventListener("input", rows);
  $("all").addEventListener("click", () => { state.touched = true; state.shown = new Set(listed().map((run) => run.name)); rows(); draw(); });
  $("none").addEventListener("click", () => { state.touched = true; state.shown.clear(); rows(); draw(); });
  $("look").addEventListener("submit", (event) => { event.preventDefault(); look(); });
  $("look-run").addEventListener("change", () => { $("look-text").value = ""; query = 1 << 20; look(); });
  $("export").addEventListener("click", async () => {
    try {
      const blob = await (await ask("/export", [...state.shown].map((name) => ["run", name]))).blob();
      const link = element("a", { href: URL.createObjectURL(blob), download: "runs.html" });
      link.click();
      setTimeout(() => URL.revokeObjectURL(link.href), 10000);
    } catch (error) { $("state").textContent = error.message; }
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  poll();
})();
