//! The activations of a decoder: one set for all layers, and the parts of a layer around its attention.

use termwise_attention::{Extra, Extras, Inputs};

use crate::config::Config;
use crate::error::Result;
use crate::model::Model;
use crate::model::places::{LayerPlaces, Places};
use crate::ops::{Buffer, embedding, few, linear, rmsnorm, swiglu};

/// Positions up to which a window is read as few rows: beyond, multiplying takes longer than reading the weights.
const FEW: usize = 32;

/// How products are computed.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Product {
    /// A few rows: reading the weights takes the time.
    Few,
    /// Many rows: multiplying takes the time.
    Many,
}

impl Product {
    /// The faster for a window of that many positions.
    pub fn for_window(positions: usize) -> Product {
        if positions <= FEW { Product::Few } else { Product::Many }
    }
}

/// Room for M positions.
pub(super) struct Buffers {
    eps: f32,
    widths: Widths,
    /// The residual [M, C], and the one before it.
    x: [Buffer; 2],
    /// Outputs of norms and steps towards the next residual [M, C].
    pub h: Buffer,
    /// 1/rms of the norm at hand [M].
    inverse: Buffer,
    q: Buffer,
    k: Buffer,
    v: Buffer,
    pub y: Buffer,
    /// Every gate that some layer has, with the outputs of a position.
    signals: Vec<(Extra, usize, Buffer)>,
    gate: Buffer,
    up: Buffer,
    product: Buffer,
    /// Products of a few rows, before they are put in order.
    columns: Buffer,
    /// [B, V]
    pub logits: Buffer,
}

#[derive(Clone, Copy)]
struct Widths {
    c: usize,
    i: usize,
    /// H·d
    queries: usize,
    /// G·d
    keys: usize,
}

impl Buffers {
    /// For up to `positions` at once, of which up to `rows` have logits.
    pub fn new(config: &Config, positions: usize, rows: usize, signals: impl Iterator<Item = (Extra, usize)>) -> Result<Buffers> {
        let shape = config.shape();
        let widths =
            Widths { c: config.hidden_size, i: config.intermediate_size, queries: shape.heads * shape.d, keys: shape.kv_heads * shape.d };
        let zeros = |width: usize| -> Result<Buffer> { Ok(Buffer::zeros(positions * width)?) };
        let mut all: Vec<(Extra, usize, Buffer)> = Vec::new();
        for (extra, outputs) in signals {
            if !all.iter().any(|(other, ..)| *other == extra) {
                all.push((extra, outputs, zeros(outputs)?));
            }
        }
        let widest = widths.c.max(widths.i).max(widths.queries);
        let columns = few::scratch_len(rows, config.vocab_size).max(few::scratch_len(rows.max(FEW), widest));
        Ok(Buffers {
            eps: config.rms_norm_eps as f32,
            widths,
            x: [zeros(widths.c)?, zeros(widths.c)?],
            h: zeros(widths.c)?,
            inverse: zeros(1)?,
            q: zeros(widths.queries)?,
            k: zeros(widths.keys)?,
            v: zeros(widths.keys)?,
            y: zeros(widths.queries)?,
            signals: all,
            gate: zeros(widths.i)?,
            up: zeros(widths.i)?,
            product: zeros(widths.i)?,
            columns: Buffer::zeros(columns)?,
            logits: Buffer::zeros(rows * config.vocab_size)?,
        })
    }

    /// From tokens [M] to the first norm.
    pub fn begin(&mut self, model: &Model, places: &Places, ids: &[u32]) {
        let (m, c, w) = (ids.len(), self.widths.c, model.params.values());
        embedding::forward(ids, &w[places.embedding.clone()], &mut self.x[0][..m * c], c);
        let weight = &w[places.layers[0].attention_norm.clone()];
        rmsnorm::forward(&self.x[0][..m * c], weight, self.eps, &mut self.h[..m * c], &mut self.inverse[..m]);
    }

    /// q, k, v and gates of a layer from h.
    pub fn project(&mut self, at: &LayerPlaces, w: &[f32], m: usize, kind: Product) {
        let Widths { c, queries, keys, .. } = self.widths;
        let Buffers { h, q, k, v, signals, columns, .. } = self;
        let h = &h[..m * c];
        multiply(kind, h, &w[at.q.clone()], None, &mut q[..m * queries], c, columns);
        multiply(kind, h, &w[at.k.clone()], None, &mut k[..m * keys], c, columns);
        multiply(kind, h, &w[at.v.clone()], None, &mut v[..m * keys], c, columns);
        for signal in &at.signals {
            let bias = signal.bias.clone().map(|range| &w[range]);
            if let Some((_, outputs, values)) = signals.iter_mut().find(|(extra, ..)| *extra == signal.extra) {
                multiply(kind, h, &w[signal.weight.clone()], bias, &mut values[..m * *outputs], c, columns);
            }
        }
    }

    /// What attention reads, `time` positions from `first` on, and where its output goes.
    pub fn inputs<'a>(
        &'a mut self,
        at: &LayerPlaces,
        w: &'a [f32],
        time: usize,
        lengths: Option<&'a [usize]>,
    ) -> (Inputs<'a, f32>, &'a mut [f32]) {
        let Widths { queries, keys, .. } = self.widths;
        let Buffers { q, k, v, y, signals, .. } = self;
        let extras = extras(at, w, signals, 0..time);
        let inputs = Inputs::new(&q[..time * queries], &k[..time * keys], &v[..time * keys]);
        (inputs.extras(extras).lengths(lengths), &mut y[..time * queries])
    }

    /// What the attention of one row reads, a single position.
    pub fn row_inputs<'a>(&'a self, at: &LayerPlaces, w: &'a [f32], slot: usize) -> Inputs<'a, f32> {
        let Widths { queries, keys, .. } = self.widths;
        let extras = extras(at, w, &self.signals, slot..slot + 1);
        let row = |x: &'a Buffer, width: usize| &x[slot * width..][..width];
        Inputs::new(row(&self.q, queries), row(&self.k, keys), row(&self.v, keys)).extras(extras)
    }

    /// From attention's output to the norm that the next layer, or the head, begins with.
    pub fn finish(&mut self, model: &Model, places: &Places, layer: usize, m: usize, kind: Product) {
        let Widths { c, i, queries, .. } = self.widths;
        let (w, at) = (model.params.values(), &places.layers[layer]);
        let Buffers { eps, x, h, inverse, y, gate, up, product, columns, .. } = self;
        let (h, inverse) = (&mut h[..m * c], &mut inverse[..m]);
        let [first, second] = x;
        let (first, second) = (&mut first[..m * c], &mut second[..m * c]);
        let (gate, up, product) = (&mut gate[..m * i], &mut up[..m * i], &mut product[..m * i]);
        multiply(kind, &y[..m * queries], &w[at.o.clone()], None, h, queries, columns);
        rmsnorm::forward_residual(first, second, &w[at.mlp_norm.clone()], *eps, h, inverse);
        multiply(kind, h, &w[at.gate.clone()], None, gate, c, columns);
        multiply(kind, h, &w[at.up.clone()], None, up, c, columns);
        swiglu::forward(gate, up, product);
        multiply(kind, product, &w[at.down.clone()], None, h, i, columns);
        let next = places.layers.get(layer + 1).map_or(&places.norm, |next| &next.attention_norm);
        rmsnorm::forward_residual(second, first, &w[next.clone()], *eps, h, inverse);
    }

    /// Logits of the first M rows of h.
    pub fn head(&mut self, weight: &[f32], m: usize, c: usize) {
        let v = weight.len() / c;
        few::forward(&self.h[..m * c], weight, None, &mut self.logits[..m * v], c, &mut self.columns);
    }
}

fn multiply(kind: Product, x: &[f32], weight: &[f32], bias: Option<&[f32]>, y: &mut [f32], width: usize, columns: &mut [f32]) {
    match kind {
        Product::Few => few::forward(x, weight, bias, y, width, columns),
        Product::Many => linear::forward(x, weight, bias, y, width),
    }
}

/// Gates of some positions, and parameters.
fn extras<'a>(
    at: &LayerPlaces,
    w: &'a [f32],
    signals: &'a [(Extra, usize, Buffer)],
    positions: std::ops::Range<usize>,
) -> Extras<&'a [f32]> {
    let mut extras = Extras::default();
    for (extra, outputs, values) in signals.iter().filter(|(extra, ..)| at.signals.iter().any(|signal| signal.extra == *extra)) {
        extras.set(*extra, &values[positions.start * outputs..positions.end * outputs]);
    }
    for (extra, range) in &at.parameters {
        extras.set(*extra, &w[range.clone()]);
    }
    extras
}
