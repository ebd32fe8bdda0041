//! What a model will cost before anything is run: parameters, operations and bytes per token in each mode, state against cache,
//! break-even contexts, the order that fits a memory, and training.
//!
//! Counts are exact by the formulas of `count.rs`; times follow from them and from a machine's peaks with stated shares
//! ([`Hardware`]). Everything that is assumed is listed in [`Plan::assumptions`].
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

/// What to plan.
#[derive(Clone, Debug)]
pub struct Options {
    /// A preset's name, or a folder with a `config.json`.
    pub model: String,
    /// A variant for all heads; the model's own where absent.
    pub attention: Option<String>,
    /// V, for presets; 32,000 for those of the paper and 257 for others where absent.
    pub vocabulary: Option<usize>,
    /// T; what the model was made for where absent.
    pub context: Option<u64>,
    /// Positions of a chunk; the engine's tile where absent.
    pub chunk: Option<u64>,
    /// B, rows that are computed together.
    pub batch: u64,
    /// Bytes that states or caches may take; the first machine's memory where absent.
    pub memory: Option<u64>,
    /// Tokens to train on; 20 a parameter where absent.
    pub tokens: Option<u64>,
    /// Machines by name; this one where there is none. Times of modes are for the first.
    pub hardware: Vec<String>,
    /// Threads on which this machine is measured.
    pub threads: usize,
    /// A network over which ranks share a step of training.
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

/// What a model will cost.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Plan {
    /// Sizes and parameters.
    pub model: Model,
    /// T
    pub context: u64,
    /// B
    pub batch: u64,
    /// Positions of a chunk.
    pub chunk: u64,
    /// Machines; times of modes and break-evens are for the first.
    pub hardware: Vec<Hardware>,
    /// The model's attention, and beside an exponential the orders that it can be cut at.
    pub columns: Vec<Column>,
    /// What fits into the memory, where one is known.
    pub fits: Option<Fits>,
    /// Training on each machine.
    pub training: Training,
    /// The same on several of them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network: Option<Shared>,
    /// Everything that is assumed, one sentence each.
    pub assumptions: Vec<String>,
}

/// One attention for the whole model.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Column {
    /// `exp`, `0..2`, or the kernel's word.
    pub label: String,
    /// The attention of all heads, or `mixed`.
    pub attention: String,
    /// What a user should know before choosing it.
    pub warnings: Vec<String>,
    /// Bytes kept between tokens for all rows at the context: states, and caches of heads that have none.
    pub state_bytes: u64,
    /// Bytes of a cache for every head at the context, all rows.
    pub cache_bytes: u64,
    /// Whether what is kept does not grow.
    pub constant: bool,
    /// A token of a prompt of T, on average, in parallel mode.
    pub parallel: Cost,
    /// The same in chunks; absent where no head has a finite state.
    pub chunk: Option<Cost>,
    /// The token at position T with states; absent where no head has one.
    pub recurrent: Option<Cost>,
    /// The token at position T with a cache for every head.
    pub cached: Cost,
    /// Contexts from which a state is worth it.
    pub break_even: BreakEven,
    /// What attention costs at any context.
    pub counts: Attention,
}

/// One token of one row.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Cost {
    /// Operations of the whole model.
    pub flops: f64,
    /// Of these, attention's.
    pub attention_flops: f64,
    /// Bytes between memory and processor, of the whole model.
    pub bytes: f64,
    /// Of these, attention's.
    pub attention_bytes: f64,
    /// On the first machine: matrices, then attention.
    pub seconds: f64,
}

/// What fits into a memory, for all layers, heads and rows.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Fits {
    /// Bytes that there are.
    pub memory: u64,
    /// Bytes of the float32 weights.
    pub weights: u64,
    /// The highest even order p for which states of 0..p fit if nothing else is there.
    pub order: Option<usize>,
    /// The same beside the weights.
    pub order_beside_weights: Option<usize>,
    /// Tokens of context for which a cache fits if nothing else is there.
    pub cache_tokens: u64,
    /// The same beside the weights.
    pub cache_tokens_beside_weights: u64,
}

/// Orders shown beside an exponential, where the engine has room for their states.
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
        // Orders beyond the engine's room would show a cache again.
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
        let text = "network: every rank computes as many tokens and makes the whole update; gradients are float32, and nothing is computed while they are sent";
        assumptions.push(text.to_owned());
    }
    Ok(Plan { context, batch, chunk, columns, fits, training, network, assumptions, hardware, model })
}

/// What decoding keeps between tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Kept {
    /// States, and caches of heads that have none, of all layers, for one row.
    pub bytes: u64,
    /// Numbers of the formula in them, without what rounding up to whole vectors adds.
    pub numbers: u64,
    /// Whether that does not grow with the context.
    pub constant: bool,
}

/// What a model keeps at this context.
pub fn kept(config: &Config, context: u64) -> Kept {
    let counts = model::attention(config);
    let d = config.head_dim;
    let of_head = |variant: &Variant| {
        variant.state_size(d, d).map_or(context.saturating_mul(2 * d as u64), |size| size.try_into().unwrap_or(u64::MAX))
    };
    let mut numbers = 0u64;
    for heads in (0..config.num_hidden_layers).map(|layer| config.heads(layer)) {
        for group in heads.chunks(config.num_attention_heads / config.num_key_value_heads) {
            // Heads of one kv head with the same variant share what they keep.
            let first = |(h, variant): &(usize, &Variant)| !group[..*h].contains(variant);
            numbers = group.iter().enumerate().filter(first).fold(numbers, |sum, (_, variant)| sum.saturating_add(of_head(variant)));
        }
    }
    Kept { bytes: counts.kept_bytes(context), numbers, constant: counts.growth() == 0 }
}

/// The kernel's word, of a series its orders alone.
fn own_label(config: &Config) -> String {
    let Some(variant) = config.uniform_attention() else { return "mixed".into() };
    let text = variant.to_string();
    let word = text.split(' ').next().unwrap_or(&text);
    word.strip_prefix("taylor=").unwrap_or(word).to_owned()
}

fn has_exponential(config: &Config) -> bool {
    (0..config.num_hidden_layers).any(|layer| config.heads(layer).iter().any(|variant| matches!(variant.near.kernel, Kernel::Exp(_))))
}

/// What all columns share.
struct Place<'a> {
    model: &'a Model,
    context: u64,
    batch: u64,
    chunk: u64,
    hardware: &'a Hardware,
}

impl Place<'_> {
    /// All positions of all rows.
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

    /// A token of its own: matrices are read once for all rows.
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
            // Where the engine has no room, heads fall back to caches, which grow.
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
        format!("caches of the processor hold one tile of {TILE} positions or one chunk of {}, and no more", place.chunk),
        "time is that of operations or of bytes, whichever is longer, for matrices and attention one after the other".to_owned(),
    ];
    for hardware in &training.hardware {
        let Hardware { name, title, precision, compute_share, bandwidth_share, source, .. } = hardware;
        list.push(format!(
            "{name}: {title}; {source}; assumed to reach {:.0} % of its {precision} operations and {:.0} % of its bandwidth",
            100.0 * compute_share,
            100.0 * bandwidth_share
        ));
    }
    if training.hardware.iter().any(|hardware| hardware.name != hardware::HERE) {
        list.push("shares of data sheets hold for models large enough to fill the machine; small ones reach far less".to_owned());
    }
    list.extend(training.assumptions.iter().cloned());
    if options.vocabulary.is_none() && termwise_train::settings::presets::MODELS.iter().any(|model| model.0 == options.model) {
        list.push(format!("a preset says no vocabulary: {} tokens are assumed", place.model.vocabulary));
    }
    list
}

#[cfg(test)]
mod tests;
