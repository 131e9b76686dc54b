// Computes vectors of python/cattn/testing/vectors.json by the core of a page; returns the bits of each one's results.
([text, names]) => {
  const { core } = document.getElementById("view").live;
  const { draws, vectors } = JSON.parse(text);
  const product = (shape) => shape.reduce((a, b) => a * b, 1);
  const draw = ([kind, seed, shape]) => {
    const [count, first, unit, type] = draws[kind];
    let x = seed;
    const numbers = Float32Array.from({ length: product(shape) }, () => {
      x = (Math.imul(1664525, x) + 1013904223) >>> 0;
      return (first + Math.floor((x >>> 16) * count / 65536)) * unit;
    });
    return type === "bool" ? Uint8Array.from(numbers, (number) => number !== 0) : numbers;
  };
  const hex = (numbers) => Array.from(new Uint32Array(numbers.buffer), (bits) => bits.toString(16).padStart(8, "0")).join("");

  // One entry of the batch after the other: the core of a page has no batch.
  const attention = (arrays, options, shapes) => {
    const [batch, heads, T_q, D] = shapes.query;
    const [T_k, D_v] = shapes.value.slice(2);
    const results = { out: "", weights: "" };
    for (let b = 0; b < batch; b++) {
      const entry = (name) => arrays[name] && (shapes[name].length < 4 ? arrays[name]
        : arrays[name].slice(b * product(shapes[name].slice(1)), (b + 1) * product(shapes[name].slice(1))));
      const one = (name, otherwise) => (Array.isArray(options[name]) ? options[name][b] : options[name] ?? otherwise);
      const offset = options.is_causal === "lower_right" ? T_k - T_q : one("query_offset", 0);
      const numbers = Float64Array.of(heads, T_q, T_k, D, D_v, options.scale ?? 1 / Math.sqrt(D), options.softcap ?? 0,
        options.is_causal ? 1 : 0, ...(options.window_size ?? [-1, -1]), offset, one("key_value_seq_starts", 0), 0, 0);
      for (const [name, stage, width] of [["out", 6, D_v], ["weights", 4, T_k]]) {
        results[name] += hex(core.call("attention", heads * T_q * width, numbers, stage, entry("query"), entry("key"),
          name === "out" ? entry("value") : null, entry("attn_mask") ?? null, arrays.alibi_slopes ?? null, arrays.sinks ?? null));
      }
    }
    return results;
  };
  const readers = {
    scaled_dot_product_attention: attention,
    linear: ({ x, weight, bias }, _, shapes) => ({ out: hex(core.linear(x, weight, bias ?? null, shapes.x.at(-1))) }),
    layer_norm: ({ x, weight }) => ({ out: hex(core.layerNorm(x, weight)) }),
    gelu: ({ x }) => ({ out: hex(core.gelu(x)) }),
    dropout: ({ x }, { p, rng }) => ({ out: hex(core.dropout(x, p, rng.TorchGenerator)) }),
  };
  return Object.fromEntries(vectors.filter(({ name }) => names.includes(name)).map(({ name, function: of, arrays, options }) => {
    const [drawn, shapes] = [{}, {}];
    for (const [key, array] of Object.entries(arrays)) [drawn[key], shapes[key]] = [draw(array), array[2]];
    return [name, readers[of](drawn, options, shapes)];
  }));
}
