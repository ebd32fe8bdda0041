//! The figure of a plan: state and cache over context.

use termwise_report::{Axis, Chart, Figure, Layer, Line, Mark, Panel, Scale, Unit, thousands};

use super::count::Work;
use super::{Column, Plan};

/// Points of a line per factor of ten.
const DENSITY: f64 = 16.0;
/// Contexts start here or below.
const FIRST: f64 = 10.0;
/// Contexts end here or above.
const MIN_LAST_CONTEXT: f64 = 1e5;
/// Maximum number of states in a figure: the number of colours other than that of the cache.
const MAX_STATES: usize = 5;

impl Plan {
    /// Bytes of memory, time per decoded token and time per prompt token over the context, for a cache and for every state, with
    /// break-evens marked; times are for the first machine.
    pub fn figure(&self) -> Figure {
        let states: Vec<(usize, &Column)> =
            self.columns.iter().filter(|column| column.counts.has_state()).take(MAX_STATES).enumerate().map(|(i, c)| (i + 1, c)).collect();
        let machine = &self.hardware[0];
        let rows = if self.batch == 1 { String::new() } else { format!(", {} rows", self.batch) };
        let contexts = self.contexts(&states);
        let over = |value: &dyn Fn(f64) -> f64| contexts.iter().map(|&t| (t, value(t))).collect::<Vec<_>>();
        let cache_of = states.first().map_or(&self.columns[0], |(_, column)| column);
        let batch = self.batch as f64;
        let seconds = |attention: Work, rows: f64| machine.seconds(self.model.matrices(rows)) + machine.seconds(attention);

        // Straight lines, without the steps of a cache's blocks.
        let kept = |c: &Column, t: f64| (c.counts.kept_bytes(0) as f64 + c.counts.growth() as f64 * t) * batch;
        let cached = |c: &Column, t: f64| c.counts.cache_growth() as f64 * t * batch;
        let step = |c: &Column, t: f64| seconds(c.counts.recurrent(t as u64), batch);
        let cached_step = |c: &Column, t: f64| seconds(c.counts.cached(t as u64), batch);
        let parallel = |c: &Column, t: f64| seconds(c.counts.parallel(t as u64), batch * t);
        // Whole chunks, so the last one does not cause jumps; none if a prompt is not longer than one.
        let chunked = |c: &Column, t: f64| match (t as u64).next_multiple_of(self.chunk) {
            whole if whole > self.chunk => seconds(c.counts.chunk(whole, self.chunk), batch * whole as f64),
            _ => f64::NAN,
        };

        let chart = |title: &str, unit: Unit, base: Curve, state: Curve, even: Even| {
            let line = |name: &str, color, points| Layer::Line(Line { name: name.into(), color, dashed: false, points });
            let mut layers = vec![line(CACHE, 0, over(&|t| base(cache_of, t)))];
            layers.extend(states.iter().map(|&(color, column)| line(&name(column), color, over(&|t| state(column, t)))));
            layers.extend(states.iter().filter_map(|&(color, column)| {
                let t = even(column)?;
                Some(Layer::Mark(Mark { x: t as f64, y: state(column, t as f64), label: thousands(t), color }))
            }));
            let x = Axis::new("context, tokens", Scale::Log, Unit::Number);
            let label = if unit == Unit::Seconds { format!("on {}", machine.title) } else { String::new() };
            Chart { title: title.into(), x, y: Axis::new(label, Scale::Log, unit), layers }
        };
        let panels = [
            chart("State or KV cache", Unit::Bytes, &cached, &kept, &|c| c.break_even.memory),
            chart("Decoding: time per token", Unit::Seconds, &cached_step, &step, &|c| c.break_even.decode),
            chart("Prompt: time per token, parallel or in chunks", Unit::Seconds, &parallel, &chunked, &|c| c.break_even.chunk),
        ];
        let panels = panels.map(Panel::Chart).into();
        Figure { title: format!("{}: KV cache or constant state{rows}", self.short_name()), description: self.description(&states), panels }
    }

    /// The last component of a path.
    pub(super) fn short_name(&self) -> &str {
        let name = self.model.name.trim_end_matches('/');
        name.rsplit('/').next().unwrap_or(name)
    }

    /// From [`FIRST`] or less to beyond every break-even, in equal ratios, including the break-evens.
    fn contexts(&self, states: &[(usize, &Column)]) -> Vec<f64> {
        let evens = states.iter().flat_map(|(_, c)| [c.break_even.memory, c.break_even.decode, c.break_even.chunk]).flatten();
        let evens: Vec<f64> = evens.map(|t| t as f64).filter(|t| (1.0..=1e8).contains(t)).collect();
        let last = evens.iter().copied().fold(MIN_LAST_CONTEXT.max(self.context as f64), f64::max);
        let first = evens.iter().copied().fold(FIRST, f64::min).log10().floor();
        let last = (last * 2.0).log10().ceil();
        let steps = ((last - first) * DENSITY) as usize;
        let mut contexts: Vec<f64> = (0..=steps).map(|i| 10f64.powf(first + i as f64 / DENSITY).round()).chain(evens).collect();
        contexts.sort_by(f64::total_cmp);
        contexts.dedup();
        contexts
    }

    fn description(&self, states: &[(usize, &Column)]) -> String {
        let mut text = format!(
            "Three charts over the context in tokens. The cache of {} grows in proportion to it, states have constant size. ",
            self.model.name
        );
        for (_, column) in states {
            let describe = |even: Option<u64>| even.map_or("never".into(), |t| format!("at {} tokens", thousands(t)));
            let even = &column.break_even;
            let (memory, decode, chunk) = (describe(even.memory), describe(even.decode), describe(even.chunk));
            text += &format!("{}: equal memory {memory}, equal time of decoding {decode}, of a prompt {chunk}. ", name(column));
        }
        text + &format!("Times on {}.", self.hardware[0].title)
    }
}

/// The baseline: a KV cache, and parallel mode in the third chart.
const CACHE: &str = "KV cache / parallel";

type Curve<'a> = &'a dyn Fn(&Column, f64) -> f64;
type Even<'a> = &'a dyn Fn(&Column) -> Option<u64>;

fn name(column: &Column) -> String {
    if column.label.starts_with(|c: char| c.is_ascii_digit()) { format!("orders {}", column.label) } else { column.label.clone() }
}
