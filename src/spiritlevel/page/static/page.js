"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const tip = document.getElementById("tip");
  const darkness = matchMedia("(prefers-color-scheme: dark)");
  const views = new Map();

  // ------------------------------------------------------------------------------------------------------- charts
  // Columns of a heat map need room for their numbers; on a narrow screen the chart scrolls inside its own box.
  const LABELS = 230, NARROW = 52, WIDE = 120;

  function embed(target, key, dark, width) {
    const spec = structuredClone(data.charts[key]);
    if (spec.width.step) {
      const columns = new Set(Object.values(spec.datasets ?? {}).concat([spec, ...spec.layer].map((part) => part.data?.values ?? []))
        .flat().map((row) => row.transform)).size;
      spec.width.step = Math.max(NARROW, Math.min(WIDE, (width - LABELS) / columns));
    } else if (target !== null && !target.isConnected && spec.width === "container") {
      spec.width = width;
      spec.autosize = "pad";
    }
    return vegaEmbed(target, spec, {
      mode: "vega-lite",
      actions: false,
      renderer: "canvas",
      config: dark ? data.themes.dark : data.themes.light,
      tooltip: (_, event, item, value) => hover(target, event, value),
    });
  }

  async function draw(plot, dark) {
    const key = plot.dataset.chart;
    views.get(key)?.finalize();
    try {
      views.set(key, await embed(plot, key, dark, plot.clientWidth));
      plot.dataset.drawn = "yes";
      fade(plot);
    } catch (error) { // one chart that fails must not take the others with it
      views.delete(key);
      plot.replaceChildren(element("p", "This chart could not be drawn; its numbers are in the tables.", "warning"));
      console.error(error);
    }
  }

  // On a page of two hundred runs, charts that nobody has scrolled near take neither time nor memory.
  const AT_ONCE = 100;
  const near = new IntersectionObserver((seen) => {
    for (const { isIntersecting, target } of seen) {
      if (!isIntersecting) continue;
      near.unobserve(target);
      draw(target, darkness.matches);
    }
  }, { rootMargin: "100%" });

  // One chart at a time, so that the first is there at once and the page answers in between.
  async function drawAll(dark) {
    document.documentElement.toggleAttribute("data-dark", dark);
    for (const [number, plot] of document.querySelectorAll(".plot").entries()) {
      if (number >= AT_ONCE && !plot.dataset.drawn) {
        near.observe(plot);
        continue;
      }
      await draw(plot, dark);
      await new Promise((resolve) => setTimeout(resolve));
    }
    document.documentElement.dataset.ready = "yes";
    if (dark) await preparePaper();
  }

  // Paper is light. A print cannot wait for charts to be drawn again, so a dark page keeps light pictures of them.
  async function preparePaper() {
    for (const plot of document.querySelectorAll(".plot[data-drawn]")) {
      const { view, finalize } = await embed(element("div"), plot.dataset.chart, false, plot.clientWidth);
      const picture = element("img", undefined, "paper");
      picture.alt = "";
      picture.src = await view.toImageURL("png", 2);
      finalize();
      plot.querySelector(".paper")?.remove();
      plot.append(picture);
    }
  }

  // What is wider than its box fades at the right until it has been scrolled to its end.
  function fade(box) {
    box.toggleAttribute("data-more", box.scrollWidth - box.clientWidth - box.scrollLeft > 2);
  }
  const resized = new ResizeObserver((seen) => { for (const { target } of seen) fade(target); });

  // ------------------------------------------------------------------------------------------------------ tooltip
  function element(kind, text, className) {
    const made = document.createElement(kind);
    if (text !== undefined) made.textContent = text;
    if (className) made.className = className;
    return made;
  }

  function place(picture, run, position) {
    const sheet = data.runs[run].sheet;
    const rowCount = Math.ceil(Object.keys(sheet.places).length / sheet.columns);
    const share = (k, count) => (count > 1 ? (100 * k) / (count - 1) : 0);
    picture.style.backgroundPosition =
      `${share(position % sheet.columns, sheet.columns)}% ${share(Math.floor(position / sheet.columns), rowCount)}%`;
  }

  function hover(plot, event, value) {
    if (value === null || value === undefined || value === "") { tip.hidden = true; return; }
    tip.replaceChildren();
    if (typeof value === "object") {
      const run = plot.closest("[data-run]").dataset.run;
      const position = data.runs[run]?.sheet?.places[value.sample];
      if (position !== undefined) {
        const picture = element("div", undefined, `picture sheet-${run}`);
        place(picture, run, position);
        tip.append(picture);
      }
      const list = element("dl");
      for (const [name, shown] of Object.entries(value)) {
        if (shown !== "" && shown !== null) list.append(element("dt", name), element("dd", shown));
      }
      tip.append(list);
    } else tip.append(element("span", String(value)));
    tip.hidden = false;
    const box = tip.getBoundingClientRect();
    const right = event.clientX + 14 + box.width > innerWidth ? event.clientX - 14 - box.width : event.clientX + 14;
    const below = event.clientY + 14 + box.height > innerHeight ? event.clientY - 14 - box.height : event.clientY + 14;
    tip.style.left = `${Math.max(4, right)}px`;
    tip.style.top = `${Math.max(4, below)}px`;
  }

  // ---------------------------------------------------------------------------------------------------- downloads
  function save(name, content, type) {
    const link = element("a");
    link.href = URL.createObjectURL(content instanceof Blob ? content : new Blob([content], { type }));
    link.download = name;
    document.body.append(link);
    link.click();
    link.remove();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  }

  // Pictures for papers: light, and of one size on every screen.
  async function saveChart(key, format) {
    const { view, finalize } = await embed(element("div"), key, false, 640);
    if (format === "svg") save(`${key}.svg`, await view.toSVG(), "image/svg+xml");
    else {
      const canvas = await view.toCanvas(2);
      canvas.toBlob((blob) => save(`${key}.png`, blob), "image/png");
    }
    finalize();
  }

  // A text that begins like a formula must not become one in a spreadsheet.
  const cell = (text) => {
    const safe = /^[=+\-@\t\r]/.test(text) ? `'${text}` : text;
    return /[",\n]/.test(safe) ? `"${safe.replaceAll('"', '""')}"` : safe;
  };
  const numeric = (text) => (text === "nan" ? "" : text);

  function saveTable(key) {
    const lines = [...document.getElementById(key).rows].map((row) =>
      [...row.cells].map((item) => item.dataset.value === undefined ? cell(item.textContent) : numeric(item.dataset.value)));
    save(`${key}.csv`, lines.map((line) => line.join(",") + "\n").join(""), "text/csv");
  }

  const KINDS = { f8: Float64Array, i4: Int32Array };

  function saveSamples(run) {
    const columns = Object.entries(data.runs[run].samples).map(([name, { kind, data }]) => {
      const bytes = Uint8Array.from(atob(data), (letter) => letter.charCodeAt(0));
      return [name, new KINDS[kind](bytes.buffer)];
    });
    const lines = [columns.map(([name]) => name).join(",")];
    for (let k = 0; k < columns[0][1].length; k++) {
      lines.push(columns.map(([, values]) => (Number.isNaN(values[k]) ? "" : values[k])).join(","));
    }
    save(`${run}-samples.csv`, lines.join("\n") + "\n", "text/csv");
  }

  document.addEventListener("click", (event) => {
    const button = event.target.closest("button");
    if (!button) return;
    const { save: format, for: key, csv, samples } = button.dataset;
    if (format) saveChart(key, format);
    else if (csv) saveTable(csv);
    else if (samples) saveSamples(samples);
  });

  // -------------------------------------------------------------------------------------------------------- start
  document.querySelectorAll(".picture[data-place]").forEach((picture) =>
    place(picture, picture.closest("[data-run]").dataset.run, Number(picture.dataset.place)));
  let printing = false; // browsers print on a light background and report that as a change
  darkness.addEventListener("change", () => printing || drawAll(darkness.matches));
  addEventListener("beforeprint", () => {
    printing = true;
    document.querySelectorAll("details:not([open])").forEach((part) => { part.open = true; part.dataset.folded = "yes"; });
  });
  addEventListener("afterprint", () => {
    printing = false;
    document.querySelectorAll("details[data-folded]").forEach((part) => { part.open = false; delete part.dataset.folded; });
  });
  document.querySelectorAll(".plot").forEach((plot) => plot.addEventListener("pointerleave", () => { tip.hidden = true; }));
  addEventListener("scroll", () => { tip.hidden = true; }, { passive: true });
  document.querySelectorAll(".scroll, .plot").forEach((box) => {
    resized.observe(box);
    box.addEventListener("scroll", () => fade(box), { passive: true });
  });
  drawAll(darkness.matches);
})();
