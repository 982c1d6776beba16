// <vaswani-attention data="..."> draws the heat maps that hoverable.py wrote into its data, and
// answers to the pointer and to arrow keys. It asks no server for anything.
(() => {
  if (customElements.get("vaswani-attention")) return;

  const MARKUP = `
    <style>
      :host { display: block; }
      .view { display: flex; flex-direction: column; gap: 0.6rem; min-width: 0; color: var(--ink);
        container-type: inline-size; }
      .controls { display: flex; flex-wrap: wrap; gap: 0.5rem 0.8rem; align-items: end; }
      label { display: grid; gap: 0.2rem; font-size: 0.8125rem; color: var(--pale); }
      select, button {
        min-height: 2.25rem; padding: 0.2rem 0.6rem; font: inherit; font-size: 0.9375rem;
        color: var(--ink); background: var(--backdrop); border: 1px solid var(--line);
        border-radius: 0.4rem; cursor: pointer;
      }
      button:hover, select:hover { border-color: var(--pale); }
      :focus-visible { outline: 2px solid var(--mark); outline-offset: 1px; }
      .size { margin-inline-start: auto; }
      output { min-height: 1.4em; line-height: 1.4; font-size: 0.9375rem; }
      @container (max-width: 30rem) {
        output { min-height: 2.8em; }
        label:first-child { flex: 1 1 100%; }
      }
      output b { font-weight: 600; }
      output b, .found { white-space: nowrap; }
      .found { margin-inline-end: 0.8em; }
      output data { font-variant-numeric: tabular-nums; color: var(--pale); }
      .hint { color: var(--pale); }
      .scroll { max-width: 100%; max-height: 80vh; overflow: auto; border-radius: 0.25rem; }
      .map { display: grid; grid-template-columns: max-content max-content; width: max-content; }
      .corner, .rows, .columns { background: var(--backdrop); position: sticky; }
      .corner { top: 0; left: 0; z-index: 3; display: grid; padding: 0.3rem; color: var(--pale);
        font-size: 0.75rem; align-content: end; justify-items: end; }
      .columns { top: 0; z-index: 2; display: flex; align-items: end; padding-bottom: 0.2rem; }
      .rows { left: 0; z-index: 1; padding-right: 0.2rem; }
      .token { cursor: default; white-space: nowrap; overflow: hidden; text-overflow: ellipsis;
        border-radius: 0.25rem; background: rgb(99 130 255 / calc(0.55 * var(--weight, 0))); }
      .rows .token { height: var(--cell); line-height: var(--cell); max-width: 9.5em;
        padding-inline: 0.3rem; text-align: end; box-sizing: border-box; }
      .columns .token { width: var(--cell); line-height: var(--cell); max-height: 9.5em;
        padding-block: 0; padding-inline: 0.3rem; writing-mode: vertical-rl;
        transform: rotate(180deg); }
      .token.on { font-weight: 600; background: var(--mark); color: #1c1917; }
      .cells { position: relative; border: 1px solid var(--line); width: max-content;
        height: max-content; }
      .cells canvas { display: block; image-rendering: pixelated; cursor: crosshair; }
      .cells i { position: absolute; pointer-events: none; display: none; box-sizing: border-box; }
      .lines { inset: 0; display: block !important; opacity: 0.5; background:
        repeating-linear-gradient(to right, transparent 0 calc(var(--cell) - 1px), var(--line) 0 var(--cell)),
        repeating-linear-gradient(to bottom, transparent 0 calc(var(--cell) - 1px), var(--line) 0 var(--cell)); }
      .row.band { left: 0; right: 0; }
      .column.band { top: 0; bottom: 0; }
      .band { outline: 2px solid var(--mark); outline-offset: -1px; }
      .legend { display: flex; flex-wrap: wrap; align-items: center; gap: 0.5rem; color: var(--pale);
        font-size: 0.8125rem; }
      .legend i { width: 7rem; height: 0.7rem; border: 1px solid var(--line); border-radius: 0.2rem; }
      details { font-size: 0.8125rem; color: var(--pale); }
      summary { cursor: pointer; }
      .overview { display: grid; gap: 3px; align-items: center; margin-top: 0.5rem;
        grid-template-columns: max-content repeat(var(--heads), minmax(0, 4rem)); }
      .overview span { text-align: center; padding-inline-end: 0.2rem; }
      .overview button { all: unset; display: block; cursor: pointer; border-radius: 2px;
        outline: 1px solid var(--line); }
      .overview button[aria-pressed=true] { outline: 2px solid var(--mark); }
      .overview canvas { display: block; width: 100%; aspect-ratio: 1; image-rendering: pixelated; }
      dialog { box-sizing: border-box; width: 100vw; height: 100dvh; max-width: none;
        max-height: none; margin: 0; padding: 1rem; border: 0; overflow: auto;
        background: var(--backdrop); font-size: 1.0625rem; }
      dialog .scroll { max-height: none; }
    </style>
    <div class="view">
      <div class="controls">
        <label>Attention<select name="map"></select></label>
        <label>Layer<select name="layer"></select></label>
        <label>Head<select name="head"></select></label>
        <button type="button" class="size"></button>
      </div>
      <output aria-live="polite"></output>
      <div class="scroll" tabindex="0" role="group">
        <div class="map">
          <div class="corner"><span></span><span></span></div>
          <div class="columns"></div>
          <div class="rows"></div>
          <div class="cells"><canvas></canvas><i class="lines"></i><i class="row band"></i><i class="column band"></i></div>
        </div>
      </div>
      <div class="legend"><span>weight 0</span><i></i><span class="peak"></span></div>
      <details><summary>All layers and heads</summary><div class="overview"></div></details>
    </div>
    <dialog aria-label="Attention, full size"></dialog>`;
  const HINT = "Point at a token or a cell, or move over the cells with the arrow keys.";
  const CELL = { panel: [18, 32], dialog: [24, 64] }; // smallest and largest side, in pixels
  const STEPS = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
  // The next view of the page starts with what the reader chose in this one.
  const chosen = { map: "0", layer: "mean", head: "mean" };
  const MOST_NAMED = 3; // tokens that are named beside the one under the pointer

  const clamp = (value, [least, most]) => Math.min(Math.max(value, least), most);
  const make = (name, properties) => Object.assign(document.createElement(name), properties);

  /** The weights of a map, (layers, heads, rows, columns), as numbers from 0 to 1. */
  function decoded(text) {
    const bytes = Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
    return Float32Array.from(new Uint16Array(bytes.buffer), (value) => value / 65535);
  }

  /** The colour of a share of the largest weight: red, green and blue. */
  function colourOf(ramp, share) {
    const place = share * (ramp.length - 1);
    const low = Math.min(Math.floor(place), ramp.length - 2);
    return ramp[low].map((value, index) => value + (place - low) * (ramp[low + 1][index] - value));
  }

  /** The first background behind an element that hides what is under it. */
  function backdropOf(element) {
    for (let node = element; node; node = node.parentElement ?? node.getRootNode().host) {
      const colour = getComputedStyle(node).backgroundColor;
      if (!/^rgba\(.*, 0\)$|^transparent$/.test(colour)) return colour;
    }
    return "Canvas";
  }

  class AttentionMaps extends HTMLElement {
    connectedCallback() {
      if (this.shadowRoot) return;
      const { colours, maps } = JSON.parse(this.getAttribute("data"));
      this.colours = colours.map((hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16)));
      this.maps = maps.map((map) => ({ ...map, weights: decoded(map.weights) }));
      const root = this.attachShadow({ mode: "open" });
      root.innerHTML = MARKUP;
      this.find = (selector) => root.querySelector(selector);
      this.choices = { map: this.find("[name=map]"), layer: this.find("[name=layer]"), head: this.find("[name=head]") };
      this.choices.map.replaceChildren(...this.maps.map((map, index) => make("option", { value: index, textContent: map.name })));
      this.choices.map.value = chosen.map;
      this.listen();
      this.chooseMap();
      this.watch();
    }

    disconnectedCallback() {
      this.watchers?.forEach((watcher) => watcher.disconnect());
    }

    /** Follow the width of the place and the theme of the page. */
    watch() {
      const sizes = new ResizeObserver(() => this.fit());
      sizes.observe(this);
      const themes = new MutationObserver(() => this.draw());
      themes.observe(document.body, { attributes: true });
      this.watchers = [sizes, themes];
    }

    listen() {
      const { map, layer, head } = this.choices;
      const [dialog, view, scroll] = ["dialog", ".view", ".scroll"].map(this.find);
      map.onchange = () => this.chooseMap();
      layer.onchange = head.onchange = () => this.chooseHead();
      this.find(".size").onclick = () => (dialog.open ? dialog.close() : this.enlarge());
      dialog.onclose = () => {
        this.shadowRoot.insertBefore(view, dialog);
        this.fit();
      };
      this.find("details").ontoggle = () => this.drawOverview();
      scroll.onkeydown = (event) => {
        const step = STEPS[event.key];
        if (!step) return;
        event.preventDefault();
        this.step(step);
      };
      for (const [side, part] of [["row", ".rows"], ["column", ".columns"]]) {
        const point = ({ target }) => target.dataset.index && this.point({ [side]: +target.dataset.index });
        this.find(part).onpointerover = this.find(part).onpointerdown = point;
      }
      const cells = this.find(".cells canvas");
      cells.onpointermove = cells.onpointerdown = ({ offsetX, offsetY }) =>
        this.point({
          row: clamp(Math.floor(offsetY / this.cell), [0, this.map.rows.length - 1]),
          column: clamp(Math.floor(offsetX / this.cell), [0, this.map.columns.length - 1]),
        });
      // A finger leaves with every tap: what it pointed at stays.
      this.find(".map").onpointerleave = ({ pointerType }) => pointerType === "mouse" && this.point({});
    }

    /** Show the tokens, layers and heads of the chosen kind of attention. */
    chooseMap() {
      this.map = this.maps[this.choices.map.value];
      const { layers, heads, rows, columns, rowName, columnName, name } = this.map;
      for (const [part, count] of [["layer", layers], ["head", heads]]) {
        const select = this.choices[part];
        const values = [...(count > 1 ? ["mean"] : []), ...Array(count).keys()];
        select.replaceChildren(...values.map((value) => make("option", { value, textContent: value })));
        select.value = chosen[part];
        if (select.selectedIndex < 0) select.selectedIndex = 0;
      }
      for (const [part, tokens] of [[".rows", rows], [".columns", columns]]) {
        const labels = tokens.map((token, index) => {
          const label = make("div", { className: "token", textContent: token, title: token });
          label.dataset.index = index;
          return label;
        });
        this.find(part).replaceChildren(...labels);
      }
      const [above, beside] = this.find(".corner").children;
      above.textContent = `${columnName} →`;
      beside.textContent = `${rowName} ↓`;
      this.find(".scroll").ariaLabel = `${name}: ${rows.length} by ${columns.length} weights`;
      this.active = {};
      this.chooseHead();
      this.fit();
    }

    chooseHead() {
      for (const [part, select] of Object.entries(this.choices)) chosen[part] = select.value;
      this.draw();
    }

    /** The weights of a layer and a head; "mean" averages over all of them. */
    weights(layer, head) {
      const { layers, heads, rows, columns, weights } = this.map;
      const size = rows.length * columns.length;
      const places = (value, count) => (value === "mean" ? [...Array(count).keys()] : [+value]);
      const maps = places(layer, layers).flatMap((l) => places(head, heads).map((h) => l * heads + h));
      return Float32Array.from({ length: size }, (_, index) =>
        maps.reduce((sum, place) => sum + weights[place * size + index], 0) / maps.length,
      );
    }

    draw() {
      const style = this.find(".view").style;
      const ink = getComputedStyle(this).color;
      const [red, green, blue] = ink.match(/[\d.]+/g).map(Number);
      const dark = 0.3 * red + 0.6 * green + 0.1 * blue > 128; // pale type stands on a dark page
      this.ramp = dark ? [...this.colours].reverse() : this.colours;
      const theme = {
        ink, backdrop: backdropOf(this), mark: "#f59e0b",
        pale: `color-mix(in srgb, ${ink} 70%, transparent)`, line: `color-mix(in srgb, ${ink} 22%, transparent)`,
      };
      for (const part of [style, this.find("dialog").style])
        for (const [name, colour] of Object.entries(theme)) part.setProperty(`--${name}`, colour);
      this.shown = this.weights(this.choices.layer.value, this.choices.head.value);
      const peak = this.paint(this.find(".cells canvas"), this.shown);
      this.find(".peak").textContent = peak.toFixed(2);
      const ramp = this.ramp.map((colour) => `rgb(${colour})`);
      this.find(".legend i").style.background = `linear-gradient(to right, ${ramp})`;
      this.drawOverview();
      this.point(this.active);
    }

    /** Draw weights on a canvas, a pixel each, and return the largest. */
    paint(canvas, weights, peak = weights.reduce((most, weight) => Math.max(most, weight), 0)) {
      canvas.width = this.map.columns.length;
      canvas.height = this.map.rows.length;
      const context = canvas.getContext("2d");
      const image = context.createImageData(canvas.width, canvas.height);
      weights.forEach((weight, index) =>
        image.data.set([...colourOf(this.ramp, Math.min(weight / peak, 1)), 255], 4 * index),
      );
      context.putImageData(image, 0, 0);
      return peak;
    }

    /** A small map of every layer and head, on one scale of colours; a click shows it large. */
    drawOverview() {
      const { layers, heads } = this.map;
      const details = this.find("details");
      details.hidden = layers * heads === 1;
      if (!details.open) return;
      const overview = this.find(".overview");
      overview.style.setProperty("--heads", heads);
      const peak = this.map.weights.reduce((most, weight) => Math.max(most, weight), 0);
      const parts = [make("span", { textContent: "layer ↓ head →" }), ...Array.from({ length: heads }, (_, head) => make("span", { textContent: head }))];
      for (let layer = 0; layer < layers; layer++) {
        parts.push(make("span", { textContent: layer }));
        for (let head = 0; head < heads; head++) {
          const button = make("button", { type: "button", tabIndex: -1, title: `layer ${layer}, head ${head}` });
          button.ariaPressed = +this.choices.layer.value === layer && +this.choices.head.value === head;
          button.onclick = () => {
            [this.choices.layer.value, this.choices.head.value] = [layer, head];
            this.chooseHead();
          };
          button.append(make("canvas"));
          this.paint(button.firstChild, this.weights(layer, head), peak);
          parts.push(button);
        }
      }
      overview.replaceChildren(...parts);
    }

    /** Mark a row, a column or a cell, and say its weights. */
    point(active) {
      this.active = active;
      const { row, column } = active;
      const { rows, columns } = this.map;
      for (const [part, marked, weight] of [
        [".rows", row, (index) => (row === undefined ? this.shown[index * columns.length + column] : 0)],
        [".columns", column, (index) => (column === undefined ? this.shown[row * columns.length + index] : 0)],
      ]) {
        const pointed = row !== undefined || column !== undefined;
        [...this.find(part).children].forEach((label, index) => {
          label.classList.toggle("on", index === marked);
          label.style.setProperty("--weight", pointed ? weight(index) : 0);
        });
      }
      this.placeBands();
      this.find("output").replaceChildren(...this.told());
    }

    /** What the marked row, column or cell says, as nodes. */
    told() {
      const { row, column } = this.active;
      const { rows, columns } = this.map;
      const token = (text) => make("b", { textContent: text });
      const number = (value) => make("data", { value, textContent: value.toFixed(3) });
      const at = (r, c) => this.shown[r * columns.length + c];
      if (row === undefined && column === undefined) return [make("span", { className: "hint", textContent: HINT })];
      if (row !== undefined && column !== undefined)
        return [token(rows[row]), " looks at ", token(columns[column]), " with weight ", number(at(row, column))];
      const tokens = row === undefined ? rows : columns;
      const weights = tokens.map((_, index) => (row === undefined ? at(index, column) : at(row, index)));
      const order = [...weights.keys()].sort((one, other) => weights[other] - weights[one]).slice(0, MOST_NAMED);
      const found = order.map((index) => {
        const span = make("span", { className: "found" });
        span.append(token(tokens[index]), " ", number(weights[index]));
        return span;
      });
      const start = row === undefined ? [token(columns[column]), " is looked at by "] : [token(rows[row]), " looks at "];
      return [...start, ...found];
    }

    /** Move the marked cell by a step, and scroll until it is seen. */
    step([down, right]) {
      const { row, column } = this.active;
      const started = row !== undefined || column !== undefined;
      const moved = (from = 0, by, tokens) => clamp(from + (started ? by : 0), [0, tokens.length - 1]);
      const cell = { row: moved(row, down, this.map.rows), column: moved(column, right, this.map.columns) };
      this.point(cell);
      const [scroll, rows, columns] = [".scroll", ".rows", ".columns"].map(this.find);
      const seen = (index, length) => [(index + 1) * this.cell - length, index * this.cell];
      scroll.scrollTop = clamp(scroll.scrollTop, seen(cell.row, scroll.clientHeight - columns.offsetHeight));
      scroll.scrollLeft = clamp(scroll.scrollLeft, seen(cell.column, scroll.clientWidth - rows.offsetWidth));
    }

    enlarge() {
      const dialog = this.find("dialog");
      dialog.append(this.find(".view"));
      dialog.showModal();
      this.find(".size").focus();
      this.fit();
    }

    /** Make cells as large as the place allows, within limits: what is larger, scrolls. */
    fit() {
      const dialog = this.find("dialog");
      const [map, cells, rows, columns] = [".map", ".cells canvas", ".rows", ".columns"].map(this.find);
      const across = (this.find(".view").clientWidth - rows.offsetWidth - 4) / this.map.columns.length;
      const down = dialog.open ? (0.7 * innerHeight - columns.offsetHeight) / this.map.rows.length : across;
      this.cell = clamp(Math.floor(Math.min(across, down)), CELL[dialog.open ? "dialog" : "panel"]);
      map.style.setProperty("--cell", `${this.cell}px`);
      map.style.fontSize = `${clamp(0.62 * this.cell, [12.5, 16])}px`;
      cells.style.width = `${this.cell * this.map.columns.length}px`;
      cells.style.height = `${this.cell * this.map.rows.length}px`;
      this.find(".size").textContent = dialog.open ? "Close" : "Full size";
      this.placeBands();
    }

    /** Put the frames round the marked row and the marked column. They cross in the marked cell. */
    placeBands() {
      for (const [name, start, side, index] of [
        ["row", "top", "height", this.active.row], ["column", "left", "width", this.active.column],
      ]) {
        const shown = index !== undefined;
        const place = shown ? { [start]: `${index * this.cell}px`, [side]: `${this.cell}px` } : {};
        Object.assign(this.find(`.${name}.band`).style, { display: shown ? "block" : "none", ...place });
      }
    }
  }

  customElements.define("vaswani-attention", AttentionMaps);
})();
