// <vaswani-attention data="..."> draws the heat maps that hoverable.py wrote into its data, and
// answers to the pointer and to arrow keys. It asks no server for anything.
function defineVaswaniAttention(style) {
  if (customElements.get("vaswani-attention")) return;

  const MARKUP = `
    <style>${style}</style>
    <div class="view">
      <div class="controls">
        <label>Kind<select name="map"></select></label>
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
          <div class="cells"><canvas></canvas><i class="lines"></i>
            <i class="row frame"></i><i class="column frame"></i></div>
        </div>
      </div>
      <div class="legend"><span>weight 0</span><i></i><span class="peak"></span></div>
      <details><summary>All layers and heads</summary><div class="overview"></div></details>
    </div>
    <dialog aria-label="Attention, full size"></dialog>`;
  const HINT = "Point at a token or a cell, or move over the cells with the arrow keys.";
  const CELL = { panel: [18, 32], dialog: [32, 64] }; // smallest and largest side, in pixels
  const SIDES = [
    { name: "row", tokens: "rows", start: "top", length: "height" },
    { name: "column", tokens: "columns", start: "left", length: "width" },
  ];
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

  /** 256 colours, as red, green, blue and opacity, between those of a ramp of hexadecimal ones. */
  function shades(ramp) {
    const stops = ramp.map((hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16)));
    return Array.from({ length: 256 }, (_, index) => {
      const place = (index / 255) * (stops.length - 1);
      const low = Math.min(Math.floor(place), stops.length - 2);
      const mixed = stops[low].map(
        (from, part) => from + (place - low) * (stops[low + 1][part] - from),
      );
      return [...mixed, 255];
    });
  }

  /** Whether a colour, in any notation of CSS, is pale. */
  function isPale(colour) {
    const context = make("canvas", { width: 1, height: 1 }).getContext("2d");
    context.fillStyle = colour;
    context.fillRect(0, 0, 1, 1);
    const [red, green, blue] = context.getImageData(0, 0, 1, 1).data;
    return 0.3 * red + 0.6 * green + 0.1 * blue > 128;
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
    static observedAttributes = ["data"];

    connectedCallback() {
      if (!this.shadowRoot) {
        const root = this.attachShadow({ mode: "open" });
        root.innerHTML = MARKUP;
        this.find = (selector) => root.querySelector(selector);
        const choice = (part) => [part, this.find(`[name=${part}]`)];
        this.choices = Object.fromEntries(["map", "layer", "head"].map(choice));
        this.listen();
      }
      this.load();
      this.watch();
    }

    /** A page that updates in place, such as Gradio's, changes the data of an element. */
    attributeChangedCallback() {
      if (this.isConnected && this.shadowRoot) this.load();
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

    load() {
      const { colours, maps } = JSON.parse(this.getAttribute("data"));
      this.colours = colours;
      this.maps = maps.map((map) => ({ ...map, weights: decoded(map.weights) }));
      const names = this.maps.map(({ name }, value) =>
        make("option", { value, textContent: name }),
      );
      this.choices.map.replaceChildren(...names);
      this.choices.map.value = chosen.map;
      this.chooseMap();
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
      for (const { name, tokens } of SIDES) {
        const labels = this.find(`.${tokens}`);
        labels.onpointerover = labels.onpointerdown = ({ target }) =>
          target.dataset.index && this.point({ [name]: +target.dataset.index });
      }
      const cells = this.find(".cells canvas");
      cells.onpointermove = cells.onpointerdown = ({ offsetX, offsetY }) =>
        this.point({
          row: clamp(Math.floor(offsetY / this.cell), [0, this.map.rows.length - 1]),
          column: clamp(Math.floor(offsetX / this.cell), [0, this.map.columns.length - 1]),
        });
      // A finger leaves with every tap: what it pointed at stays.
      this.find(".map").onpointerleave = ({ pointerType }) =>
        pointerType === "mouse" && this.point({});
    }

    /** Show the tokens, layers and heads of the chosen kind of attention. */
    chooseMap() {
      this.map = this.maps[this.choices.map.value];
      const { layers, heads, rows, columns, rowName, columnName, name } = this.map;
      for (const [part, count] of [
        ["layer", layers],
        ["head", heads],
      ]) {
        const select = this.choices[part];
        const values = [...(count > 1 ? ["mean"] : []), ...Array(count).keys()];
        select.replaceChildren(
          ...values.map((value) => make("option", { value, textContent: value })),
        );
        select.value = chosen[part];
        if (select.selectedIndex < 0) select.selectedIndex = 0;
      }
      for (const { tokens } of SIDES) {
        const labels = this.map[tokens].map((token, index) => {
          const label = make("div", { className: "token", textContent: token, title: token });
          label.dataset.index = index;
          return label;
        });
        this.find(`.${tokens}`).replaceChildren(...labels);
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
      const maps = places(layer, layers).flatMap((l) =>
        places(head, heads).map((h) => l * heads + h),
      );
      return Float32Array.from(
        { length: size },
        (_, index) =>
          maps.reduce((sum, place) => sum + weights[place * size + index], 0) / maps.length,
      );
    }

    draw() {
      const style = this.find(".view").style;
      const ink = getComputedStyle(this).color;
      const ramp = isPale(ink) ? [...this.colours].reverse() : this.colours; // a dark page
      this.shades = shades(ramp);
      const theme = {
        ink,
        backdrop: backdropOf(this),
        mark: "#f59e0b",
        pale: `color-mix(in srgb, ${ink} 70%, transparent)`,
        line: `color-mix(in srgb, ${ink} 22%, transparent)`,
      };
      for (const part of [style, this.find("dialog").style])
        for (const [name, colour] of Object.entries(theme)) part.setProperty(`--${name}`, colour);
      this.shown = this.weights(this.choices.layer.value, this.choices.head.value);
      this.peak = this.paint(this.find(".cells canvas"), this.shown);
      this.find(".peak").textContent = this.peak.toFixed(2);
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
        image.data.set(this.shades[Math.round(255 * Math.min(weight / peak, 1))], 4 * index),
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
      const parts = [
        make("span", { textContent: "layer ↓ head →" }),
        ...Array.from({ length: heads }, (_, head) => make("span", { textContent: head })),
      ];
      for (let layer = 0; layer < layers; layer++) {
        parts.push(make("span", { textContent: layer }));
        for (let head = 0; head < heads; head++) parts.push(this.thumbnail(layer, head, peak));
      }
      overview.replaceChildren(...parts);
    }

    thumbnail(layer, head, peak) {
      const title = `layer ${layer}, head ${head}`;
      // The two lists choose the same by keyboard.
      const button = make("button", { type: "button", tabIndex: -1, title });
      const { layer: one, head: two } = this.choices;
      button.ariaPressed = one.value === `${layer}` && two.value === `${head}`;
      button.onclick = () => {
        [one.value, two.value] = [layer, head];
        this.chooseHead();
      };
      button.append(make("canvas"));
      this.paint(button.firstChild, this.weights(layer, head), peak);
      return button;
    }

    /** The shown weight of a cell. */
    weight({ row, column }) {
      return this.shown[row * this.map.columns.length + column];
    }

    /** Mark a row, a column or a cell, and say its weights. */
    point(active) {
      this.active = active;
      const marked = SIDES.filter(({ name }) => active[name] !== undefined);
      for (const { name, tokens } of SIDES) {
        // Tokens are shaded by their weights if only a token of the other side is marked.
        const shaded = marked.length === 1 && active[name] === undefined;
        [...this.find(`.${tokens}`).children].forEach((label, index) => {
          const share = shaded ? this.weight({ ...active, [name]: index }) / this.peak : 0;
          label.style.setProperty("--share", share);
          label.classList.toggle("on", index === active[name]);
        });
      }
      this.placeFrames();
      this.find("output").replaceChildren(...this.told(marked));
    }

    /** What the marked sides say, as nodes. */
    told(marked) {
      const token = ({ name, tokens }, index = this.active[name]) =>
        make("b", { textContent: this.map[tokens][index] });
      const number = (value) => make("data", { value, textContent: value.toFixed(3) });
      const [row, column] = SIDES;
      if (marked.length === 0) return [make("span", { className: "hint", textContent: HINT })];
      if (marked.length === 2) {
        const weight = number(this.weight(this.active));
        return [token(row), " looks at ", token(column), " with weight ", weight];
      }
      const [side] = marked;
      const other = side === row ? column : row;
      const weights = this.map[other.tokens].map((_, index) =>
        this.weight({ ...this.active, [other.name]: index }),
      );
      const largest = [...weights.keys()].sort((one, two) => weights[two] - weights[one]);
      const found = largest.slice(0, MOST_NAMED).flatMap((index, place) => {
        const span = make("span", { className: "found" });
        span.append(token(other, index), " ", number(weights[index]));
        return place ? [", ", span] : [span];
      });
      return [token(side), side === row ? " looks at " : " is looked at by ", ...found];
    }

    /** Move the marked cell by a step, and scroll until it is seen. */
    step([down, right]) {
      const { row, column } = this.active;
      const started = row !== undefined || column !== undefined;
      const moved = (from = 0, by, tokens) =>
        clamp(from + (started ? by : 0), [0, tokens.length - 1]);
      const cell = {
        row: moved(row, down, this.map.rows),
        column: moved(column, right, this.map.columns),
      };
      this.point(cell);
      const [scroll, rows, columns] = [".scroll", ".rows", ".columns"].map(this.find);
      const seen = (index, length) => [(index + 1) * this.cell - length, index * this.cell];
      const [height, width] = [
        scroll.clientHeight - columns.offsetHeight,
        scroll.clientWidth - rows.offsetWidth,
      ];
      scroll.scrollTop = clamp(scroll.scrollTop, seen(cell.row, height));
      scroll.scrollLeft = clamp(scroll.scrollLeft, seen(cell.column, width));
    }

    enlarge() {
      const dialog = this.find("dialog");
      dialog.append(this.find(".view"));
      dialog.showModal();
      this.find(".size").focus();
      this.fit();
    }

    /** Make cells as large as the place allows, within limits. Larger maps scroll. */
    fit() {
      const dialog = this.find("dialog");
      const [map, cells, rows, columns] = [".map", ".cells canvas", ".rows", ".columns"].map(
        this.find,
      );
      const across =
        (this.find(".view").clientWidth - rows.offsetWidth - 4) / this.map.columns.length;
      const down = dialog.open
        ? (0.7 * innerHeight - columns.offsetHeight) / this.map.rows.length
        : across;
      this.cell = clamp(Math.floor(Math.min(across, down)), CELL[dialog.open ? "dialog" : "panel"]);
      map.style.setProperty("--cell", `${this.cell}px`);
      map.style.fontSize = `${clamp(0.62 * this.cell, [12.5, 16])}px`;
      cells.style.width = `${this.cell * this.map.columns.length}px`;
      cells.style.height = `${this.cell * this.map.rows.length}px`;
      this.find(".size").textContent = dialog.open ? "Close" : "Full size";
      this.placeFrames();
    }

    /** Put frames round the marked row and the marked column. They cross in the marked cell. */
    placeFrames() {
      for (const { name, start, length } of SIDES) {
        const index = this.active[name];
        const frame = this.find(`.${name}.frame`).style;
        frame.display = index === undefined ? "none" : "block";
        frame[start] = `${index * this.cell}px`;
        frame[length] = `${this.cell}px`;
      }
    }
  }

  customElements.define("vaswani-attention", AttentionMaps);
}
