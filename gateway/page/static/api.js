// Shows /openapi.json: each endpoint with its options.

function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  Object.assign(element, properties);
  element.append(...children);
  return element;
}

function limits(schema) {
  if (schema.anyOf) return [...new Set(schema.anyOf.filter((part) => part.type !== "null").map(limits))].join(" or ");
  if (schema.enum) return schema.enum.join(", ");
  if ("const" in schema) return schema.const;
  const kind = [schema.type].flat().filter(Boolean).join(" or ") || "anything";
  const bounds = [["minimum", "from"], ["exclusiveMinimum", "above"], ["maximum", "to"], ["minItems", "at least"],
    ["maxItems", "at most"], ["maxLength", "at most"]].filter(([name]) => name in schema).map(([name, word]) => `${word} ${schema[name]}`);
  return [kind, ...bounds].join(" ");
}

const document_ = await (await fetch("/openapi.json")).json();
const sections = Object.entries(document_.paths).flatMap(([path, methods]) => Object.entries(methods).map(([method, described]) => {
  const section = make("section", { className: "card" },
    make("h2", {}, make("code", { textContent: `${method.toUpperCase()} ${path}` })), make("p", { textContent: described.summary }));
  const body = described.requestBody?.content["application/json"].schema;
  if (body) {
    const rows = Object.entries(body.properties).map(([name, schema]) => make("tr", {},
      make("td", {}, make("code", { textContent: name })),
      make("td", { textContent: limits(schema) + (body.required.includes(name) ? ", required" : "") })));
    section.append(make("details", {}, make("summary", { textContent: `${rows.length} options` }),
      make("div", { className: "scroll" }, make("table", {}, make("tbody", {}, ...rows)))));
  }
  return section;
}));
document.getElementById("endpoints").replaceChildren(...sections);
