const { charts, datasets, config } = JSON.parse(document.getElementById("data").textContent);
const options = {
  actions: false,
  ast: true, // formulas are interpreted: the page allows no code that is made of text
  config,
  mode: "vega-lite",
  renderer: "svg",
  tooltip: { theme: "custom" },
};
const drawn = Array.from(document.querySelectorAll("[data-chart]"), (place) =>
  vegaEmbed(place, { ...charts[place.dataset.chart], datasets: structuredClone(datasets) }, options)
);
Promise.all(drawn).then(() => { document.documentElement.dataset.drawn = drawn.length; });
