//! Cost estimates of a model before a run: parameters, operations and bytes per token in each mode, state and cache sizes,
//! break-even contexts, the order that fits into memory, and training time.
//!
//! Counts are exact, by the formulas of `count.rs`. Times follow from them and from a machine's peaks with stated fractions
//! ([`Hardware`]). All assumptions are listed in [`Plan::assumptions`].
//!
//! ```
//! use termwise_analysis::plan::{Options, plan};
//!
//! let options = Options { model: "paper-small".into(), hardware: vec!["a100".into()], ..Options::default() };
//! let plan = plan(&options)?;
//! assert_eq!(plan.columns[1].label, "0..2");
//! assert_eq!(plan.columns[1].break_even.memory, Some(1089));
//! # Ok::<(), termwise_analysis::Error>(())
//! ```

mod break_even;
pub mod count;
mod document;
mod figure;
mod hardware;
mod model;
mod network;
mod size;
mod training;

use serde::{Deserialize, Serialize};
use termwise_attention::break_even;
use termwise_attention::parts::kernel::taylor::MAX_ORDER;
use termwise_attention::{Kernel, Variant};
use termwise_model::Config;

pub use break_even::BreakEven;
pub use count::{Attention, Work};
pub use hardware::Hardware;
pub use model::{Kind, Model};
pub use network::{Network, Shared, SharedStep};
pub use size::{parse_bytes, parse_count};
pub use training::{Training, TrainingTime};

use crate::Error;
use count::TILE;

/// Options of a plan.
#[derive(Clone, Debug)]
pub struct Options {
    /// A preset's name, or a directory with a `config.json`.
    pub model: String,
    /// A variant for all heads; default: that of the model.
    pub attention: Option<String>,
    /// V, for presets; default: 32,000 for those of the paper, otherwise 257.
    pub vocabulary: Option<usize>,
    /// T; default: the context length of the model.
    pub context: Option<u64>,
    /// Positions of a chunk; default: the engine's tile.
    pub chunk: Option<u64>,
    /// B, number of rows computed together.
    pub batch: u64,
    /// Bytes for states or caches; default: the first machine's memory.
    pub memory: Option<u64>,
    /// Training tokens; default: 20 per parameter.
    pub tokens: Option<u64>,
    /// Machines by name; default: this one. Times of modes are for the first.
    pub hardware: Vec<String>,
    /// Threads for the measurement of this machine.
    pub threads: usize,
    /// A network over which ranks share a training step.
    pub network: Option<Network>,
}

impl Default for Options {
    fn default() -> Options {
        Options {
            model: "tiny".into(),
            attention: None,
            vocabulary: None,
            context: None,
            chunk: None,
            batch: 1,
            memory: None,
            tokens: None,
            hardware: Vec::new(),
            threads: 1,
            network: None,
        }
    }
}

/// The cost estimate of a model.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Plan {
    /// Sizes and parameters.
    pub model: Model,
    /// Context length in tokens, T.
    pub context: u64,
    /// Batch rows, B.
    pub batch: u64,
    /// Positions of a chunk.
    pub chunk: u64,
    /// Machines; times of modes and break-evens are for the first.
    pub hardware: Vec<Hardware>,
    /// The model's attention, and for an exponential also its truncations.
    pub columns: Vec<Column>,
    /// What fits into memory, if its size is known.
    pub fits: Option<Fits>,
    /// Training on each machine.
    pub training: Training,
    /// Training with several ranks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network: Option<Shared>,
    /// All assumptions, one sentence each.
    pub assumptions: Vec<String>,
}

/// One attention for the whole model.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Column {
    /// `exp`, `0..2`, or the kernel's word.
    pub label: String,
    /// The attention of all heads, or `mixed`.
    pub attention: String,
    /// Warnings of the variant.
    pub warnings: Vec<String>,
    /// Bytes for all rows at the context: states, and caches of heads without a state.
    pub state_bytes: u64,
    /// Bytes of a cache for every head at the context, all rows.
    pub cache_bytes: u64,
    /// Whether the memory has constant size.
    pub constant: bool,
    /// Average cost per token of a prompt of T in parallel mode.
    pub parallel: Cost,
    /// The same in chunks; absent if no head has a finite state.
    pub chunk: Option<Cost>,
    /// Cost of the token at position T with states; absent if no head has one.
    pub recurrent: Option<Cost>,
    /// Cost of the token at position T with a cache for every head.
    pub cached: Cost,
    /// Break-even contexts.
    pub break_even: BreakEven,
    /// Costs of attention at any context.
    pub counts: Attention,
}

/// One token of one row.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Cost {
    /// Operations of the whole model.
    pub flops: f64,
    /// Operations of attention.
    pub attention_flops: f64,
    /// Bytes between memory and processor, of the whole model.
    pub bytes: f64,
    /// Bytes of attention.
    pub attention_bytes: f64,
    /// Seconds on the first machine: matrices, then attention.
    pub seconds: f64,
}

/// What fits into memory, for all layers, heads and rows.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Fits {
    /// Bytes available.
    pub memory: u64,
    /// Bytes of the float32 weights.
    pub weights: u64,
    /// The highest even order p for which states of 0..p fit, without other data in memory.
    pub order: Option<usize>,
    /// The same with the weights in memory.
    pub order_beside_weights: Option<usize>,
    /// Tokens of context for which a cache fits, without other data in memory.
    pub cache_tokens: u64,
    /// The same with the weights in memory.
    pub cache_tokens_beside_weights: u64,
}

/// Orders shown for an exponential, if the engine supports their states.
const ORDERS: [usize; 4] = [2, 3, 4, 6];

/// Plans a model.
pub fn plan(options: &Options) -> Result<Plan, Error> {
    let mut config = model::find(&options.model, options.vocabulary)?;
    if let Some(text) = &options.attention {
        config.set_attention(text.parse::<Variant>()?)?;
    }
    let hardware = Hardware::find(&options.hardware, options.threads)?;
    let model = Model::new(&options.model, &config)?;
    let context = options.context.unwrap_or(config.max_position_embeddings as u64).max(1);
    let batch = options.batch.max(1);
    let chunk = options.chunk.unwrap_or(TILE as u64).clamp(1, context);
    let place = Place { model: &model, context, batch, chunk, hardware: &hardware[0] };

    let mut columns = vec![place.column(&config, own_label(&config))];
    let cuts = if has_exponential(&config) { &ORDERS[..] } else { &[] };
    for &order in cuts {
        let column = model::cut(&config, order).map(|cut| place.column(&cut, format!("0..{order}")));
        // Orders whose states the engine does not support would show a cache again.
        columns.extend(column.filter(|column| column.counts.has_state() && column.counts.endless_pair < columns[0].counts.pair));
    }
    let fits = options.memory.or(hardware[0].memory).map(|memory| place.fits(&config, &columns[0].counts, memory));
    let training = training::plan(&place, &columns, &hardware, options.tokens);
    let mut assumptions = assumptions(&place, options, &training);
    if columns.iter().any(|column| column.counts.ring > 0) {
        assumptions.push("windows are counted at their full size: an upper bound for contexts shorter than a window".to_owned());
    }
    let network = options.network.map(|network| network::share(network, &place, &training));
    if network.is_some() {
        let text = "network: every rank computes the same number of tokens and the whole update; gradients are float32, and communication does not overlap with computation";
        assumptions.push(text.to_owned());
    }
    Ok(Plan { context, batch, chunk, columns, fits, training, network, assumptions, hardware, model })
}

/// Memory between decoded tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Kept {
    /// Bytes of states, and of caches of heads without a state, of all layers, for one row.
    pub bytes: u64,
    /// Number of float32 values in them, without padding.
    pub numbers: u64,
    /// Whether it does not grow with the context.
    pub constant: bool,
}

/// The memory of a model at this context.
pub fn kept(config: &Config, context: u64) -> Kept {
    let counts = model::attention(config);
    let d = config.head_dim;
    let of_head = |variant: &Variant| {
        variant.state_size(d, d).map_or(context.saturating_mul(2 * d as u64), |size| size.try_into().unwrap_or(u64::MAX))
    };
    let mut numbers = 0u64;
    for heads in (0..config.num_hidden_layers).map(|layer| config.heads(layer)) {
        for group in heads.chunks(config.num_attention_heads / config.num_key_value_heads) {
            // Heads of one KV head with the same variant share memory.
            let first = |(h, variant): &(usize, &Variant)| !group[..*h].contains(variant);
            numbers = group.iter().enumerate().filter(first).fold(numbers, |sum, (_, variant)| sum.saturating_add(of_head(variant)));
        }
    }
    Kept { bytes: counts.kept_bytes(context), numbers, constant: counts.growth() == 0 }
}

/// The kernel's word; for a series its orders.
fn own_label(config: &Config) -> String {
    let Some(variant) = config.uniform_attention() else { return "mixed".into() };
    let text = variant.to_string();
    let word = text.split(' ').next().unwrap_or(&text);
    word.strip_prefix("taylor=").unwrap_or(word).to_owned()
}

fn has_exponential(config: &Config) -> bool {
    (0..config.num_hidden_layers).any(|layer| config.heads(layer).iter().any(|variant| matches!(variant.near.kernel, Kernel::Exp(_))))
}

/// Values shared by all columns.
struct Place<'a> {
    model: &'a Model,
    context: u64,
    batch: u64,
    chunk: u64,
    hardware: &'a Hardware,
}

impl Place<'_> {
    /// Total positions of all rows.
    fn tokens_a_step(&self) -> u64 {
        self.batch.saturating_mul(self.context)
    }

    fn column(&self, config: &Config, label: String) -> Column {
        let Place { context, batch, chunk, hardware, .. } = *self;
        let counts = model::attention(config);
        let variant = config.uniform_attention();
        let auto = variant.and_then(|variant| break_even(variant, model::shape(config, batch))).map(|t| t as u64);
        Column {
            label,
            attention: variant.map_or("mixed".into(), Variant::to_string),
            warnings: variant.map(Variant::warnings).unwrap_or_default(),
            state_bytes: counts.kept_bytes(context).saturating_mul(batch),
            cache_bytes: counts.cache_bytes(context).saturating_mul(batch),
            constant: counts.growth() == 0,
            parallel: self.prompt(counts.parallel(context)),
            chunk: counts.has_state().then(|| self.prompt(counts.chunk(context, chunk))),
            recurrent: counts.has_state().then(|| self.token(counts.recurrent(context))),
            cached: self.token(counts.cached(context)),
            break_even: BreakEven::of(&counts, chunk, hardware, auto),
            counts,
        }
    }

    /// A token of a prompt: matrices are read once for all rows and positions.
    fn prompt(&self, attention: Work) -> Cost {
        self.cost(attention, self.batch as f64 * self.context as f64)
    }

    /// A single token: matrices are read once for all rows.
    fn token(&self, attention: Work) -> Cost {
        self.cost(attention, self.batch as f64)
    }

    fn cost(&self, attention: Work, rows: f64) -> Cost {
        let rest = self.model.matrices(rows);
        Cost {
            flops: rest.flops + attention.flops,
            attention_flops: attention.flops,
            bytes: rest.bytes + attention.bytes,
            attention_bytes: attention.bytes,
            seconds: self.hardware.seconds(rest) + self.hardware.seconds(attention),
        }
    }

    fn fits(&self, config: &Config, own: &Attention, memory: u64) -> Fits {
        let weights = self.model.parameters.saturating_mul(4);
        let beside = memory.saturating_sub(weights);
        let needs = |order: usize| {
            let counts = model::attention(&model::cut(config, order)?);
            // If a state is too large for the engine, heads fall back to caches, which grow.
            (counts.endless_pair <= own.endless_pair && counts.has_state())
                .then(|| counts.kept_bytes(self.context).saturating_mul(self.batch))
        };
        let (mut order, mut order_beside_weights) = (None, None);
        for p in (0..=MAX_ORDER).step_by(2) {
            let Some(bytes) = needs(p).filter(|&bytes| bytes <= memory) else { break };
            order = Some(p);
            if bytes <= beside {
                order_beside_weights = Some(p);
            }
        }
        let tokens = |bytes: u64| bytes / own.cache_growth().saturating_mul(self.batch).max(1);
        let (cache_tokens, cache_tokens_beside_weights) = (tokens(memory), tokens(beside));
        Fits { memory, weights, order, order_beside_weights, cache_tokens, cache_tokens_beside_weights }
    }
}

fn assumptions(place: &Place, options: &Options, training: &Training) -> Vec<String> {
    let mut list = vec![
        "a multiply-add is two operations; RoPE, gates, norms and the evaluation of the kernel are not counted".to_owned(),
        format!(
            "weights, states and caches are float32; decoding reads the weights once for {} and a state is read and written once per token",
            if place.batch == 1 { "every token".into() } else { format!("{} rows", place.batch) }
        ),
        format!("processor caches contain only one tile of {TILE} positions or one chunk of {}", place.chunk),
        "time is the maximum of compute time and memory time, added for matrices and attention".to_owned(),
    ];
    for hardware in &training.hardware {
        let Hardware { name, title, precision, compute_share, bandwidth_share, source, .. } = hardware;
        list.push(format!(
            "{name}: {title}; {source}; assumed to reach {:.0} % of its {precision} operations and {:.0} % of its bandwidth",
            100.0 * compute_share,
            100.0 * bandwidth_share
        ));
    }
    if training.hardware.iter().any(|hardware| hardware.name != hardware::LOCAL) {
        list.push("fractions of data sheet peaks apply to models large enough to fill the machine; small models reach far less".to_owned());
    }
    list.extend(training.assumptions.iter().cloned());
    if options.vocabulary.is_none() && termwise_train::settings::presets::MODELS.iter().any(|model| model.0 == options.model) {
        list.push(format!("a preset has no vocabulary size: {} tokens are assumed", place.model.vocabulary));
    }
    list
}

#[cfg(test)]
mod tests;
