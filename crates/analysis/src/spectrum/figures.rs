//! A spectrum as figures, tables and an HTML report.

use termwise_report::{
    Axis, Band, Block, Cell, Chart, Document, Documented, Figure, HeatMap, Layer, Line, Names, Rule, Scale, Section, Shade, Table, Unit,
    counted, ramp, thousands,
};

use super::{CutFacts, LayerSpectrum, Magnitudes, OverHeads, Spectrum, Terms, Timing};

/// Smaller magnitudes have the darkest colour and are not plotted; they are negligible relative to order 0, which is 1.
const MIN_MAGNITUDE: f64 = 1e-6;

fn capitalized(sentence: &str) -> String {
    let mut letters = sentence.chars();
    letters.next().map_or(String::new(), |first| first.to_uppercase().chain(letters).collect())
}

/// Errors below this are drawn there: 0.01 %.
const MIN_ERROR: f64 = 1e-4;
/// Layers in the table of the summary, so the conclusion and the table fit on a screen.
const SUMMARY_LAYERS: usize = 5;

type Which = fn(&Terms) -> &Magnitudes;

/// Three sets of pairs, with their names.
const KINDS: [(&str, &str, Which); 3] = [
    ("all", "all scores (published metric)", |terms| &terms.all),
    ("positive", "nonnegative scores", |terms| &terms.positive),
    ("negative", "negative scores", |terms| &terms.negative),
];

/// The end of a conclusion without a sufficient order for most heads.
const NEXT: &str = " `termwise truncate` measures the loss at these orders, also with coefficients fitted to each head.";

impl Spectrum {
    /// The order that each head needs for an error of 1 %, per layer and head.
    pub fn order_map(&self) -> HeatMap {
        let most = self.orders.last().copied().unwrap_or(0) as f64;
        let value = |layer: &LayerSpectrum, head: usize| Some(layer.heads.get(head)?.cut.as_ref()?.order_for.one_percent? as f64);
        HeatMap {
            title: format!("Series around 0: order for an error of 1 % (struck out or ·: more than {most})"),
            x: Names::count("head", self.model.heads),
            y: Names::count("layer", self.layers.len()),
            values: self.layers.iter().map(|layer| (0..self.model.heads).map(|head| value(layer, head)).collect()).collect(),
            shade: Shade::Linear,
            range: Some((0.0, most)),
            unit: Unit::Number,
        }
    }

    /// log10 of the magnitude, per layer and order.
    fn magnitude_map(&self, title: &str, which: Which) -> HeatMap {
        let row = |layer: &LayerSpectrum| layer.terms.as_ref().map_or(vec![None; super::ORDERS], |terms| which(terms).log10.clone());
        let values: Vec<Vec<Option<f64>>> = self.layers.iter().map(row).collect();
        let most = values.iter().flatten().flatten().copied().fold(f64::NEG_INFINITY, f64::max);
        HeatMap {
            title: format!("log10 of the term magnitude per order: {title}"),
            x: Names::count("order", super::ORDERS),
            y: Names::count("layer", self.layers.len()),
            values,
            shade: Shade::Linear,
            range: most.is_finite().then(|| (MIN_MAGNITUDE.log10().min(most), most)),
            unit: Unit::Number,
        }
    }

    /// Magnitude against order, one line per layer.
    fn magnitude_chart(&self, title: &str, which: Which) -> Chart {
        let line = |layer: &LayerSpectrum| {
            let logs = &which(layer.terms.as_ref()?).log10;
            let points = logs.iter().enumerate().filter_map(|(n, log)| Some((n as f64, log.filter(|&log| log > MIN_MAGNITUDE.log10())?)));
            Some(Layer::Line(self.line_of(layer, points.collect())))
        };
        Chart {
            title: format!("Magnitude of the terms: {title}"),
            x: Axis::new("order", Scale::Linear, Unit::Number),
            // Logarithms on a linear axis: magnitudes of large scores exceed the range of float64.
            y: Axis::new("log10 of the mean of |xⁿ/n!|", Scale::Linear, Unit::Number),
            layers: self.layers.iter().filter_map(line).collect(),
        }
    }

    /// The error of each order: one line for the median head of each layer, and a band over all heads of the model. Errors below [`MIN_ERROR`] are drawn
    /// there. `None` if no head has such errors.
    fn error_chart(&self, title: &str, which: fn(&CutFacts) -> Option<&[Option<f64>]>) -> Option<Chart> {
        let errors = |layer: &LayerSpectrum, at: usize| -> Vec<f64> {
            let errors = layer.heads.iter().filter_map(|head| which(head.cut.as_ref()?)?.get(at).copied()?);
            let mut errors: Vec<f64> = errors.map(|error| error.max(MIN_ERROR)).collect();
            errors.sort_by(f64::total_cmp);
            errors
        };
        let band = self.orders.iter().enumerate().filter_map(|(at, &p)| {
            let all: Vec<f64> = self.layers.iter().flat_map(|layer| errors(layer, at)).collect();
            let low = all.iter().copied().reduce(f64::min)?;
            Some((p as f64, low, all.iter().copied().fold(low, f64::max)))
        });
        let mut layers = vec![Layer::Band(Band { name: "all heads".into(), color: 0, points: band.collect() })];
        for layer in &self.layers {
            let median = |at: usize| errors(layer, at).get(errors(layer, at).len() / 2).copied();
            let points: Vec<(f64, f64)> = self.orders.iter().enumerate().filter_map(|(at, &p)| Some((p as f64, median(at)?))).collect();
            if !points.is_empty() {
                layers.push(Layer::Line(self.line_of(layer, points)));
            }
        }
        for (bound, name) in [(0.1, "10 %"), (0.01, "1 %"), (0.001, "0.1 %")] {
            layers.push(Layer::Rule(Rule { y: bound, label: name.into(), color: 0 }));
        }
        let any = layers.iter().any(|layer| matches!(layer, Layer::Line(_)));
        any.then(|| Chart {
            title: title.into(),
            x: Axis::new("truncation order", Scale::Linear, Unit::Number),
            y: Axis::new("RMS(y_p − y) / RMS(y)", Scale::Log, Unit::Percent),
            layers,
        })
    }

    /// Layers in groups of equal color, a sequential ramp from the first to the last; the legend names the groups.
    fn line_of(&self, layer: &LayerSpectrum, points: Vec<(f64, f64)>) -> Line {
        let (count, groups) = (self.layers.len(), self.layers.len().min(5));
        let group = layer.layer * groups / count.max(1);
        // The smallest layer l with l·groups / count = group.
        let first = |group: usize| (group * count).div_ceil(groups);
        let (begin, end) = (first(group), first(group + 1) - 1);
        let name = if begin == end { format!("layer {begin}") } else { format!("layers {begin} to {end}") };
        // In trained models the last layer often differs from the others.
        let dashed = layer.layer + 1 == count && begin != end;
        Line { name: if dashed { format!("layer {}", layer.layer) } else { name }, color: ramp(group, groups), dashed, points }
    }

    /// The orders needed by the heads of each layer.
    pub fn orders_table(&self) -> Table {
        self.orders_of(&self.layers.iter().collect::<Vec<_>>(), "")
    }

    /// The same for at most `most` layers: the first, the last and evenly spaced ones between them.
    fn brief_orders_table(&self, most: usize) -> Table {
        let count = self.layers.len();
        if count <= most {
            return self.orders_table();
        }
        let layers: Vec<&LayerSpectrum> = (0..most).map(|i| &self.layers[i * (count - 1) / (most - 1)]).collect();
        self.orders_of(&layers, &format!(" ({most} of {count} layers)"))
    }

    fn orders_of(&self, layers: &[&LayerSpectrum], which: &str) -> Table {
        let most = self.orders.last().copied().unwrap_or(0);
        let at_most = format!("at {most}");
        let columns = ["layer", "10 %", "worst", "1 %", "worst", "0.1 %", "worst", &at_most, "worst", "1 %, mean", "worst"];
        let caption = format!(
            "Order that the median and the worst head need for an error of 10, 1 and 0.1 % of their output, their error at order {most}, and the order for 1 % with the series around the mean score of each row{which}"
        );
        let mut table = Table::new(caption, columns);
        for layer in layers {
            let mut row = vec![Cell::Number(layer.layer as f64, 0)];
            let order = |order: Option<usize>| order.map_or(Cell::text(format!("> {most}")), |order| Cell::Number(order as f64, 0));
            for over in layer.order_for().into_iter().flatten() {
                let OverHeads { median, worst } = over;
                row.extend([order(median), order(worst)]);
            }
            row.extend(layer.last_error().into_iter().flatten().map(|error| match error.is_finite() {
                true => Cell::Amount(error, Unit::Percent),
                false => Cell::text("overflow"),
            }));
            row.resize(9, Cell::Empty);
            row.extend(layer.centered_order().into_iter().flat_map(|OverHeads { median, worst }| [order(median), order(worst)]));
            row.resize(11, Cell::Empty);
            table.rows.push(row);
        }
        table
    }

    /// Dominant orders, scores and entropy of each layer.
    pub fn scores_table(&self) -> Table {
        let columns = ["layer", "dominant", "x ≥ 0", "x < 0", "score", "min", "max", "entropy"];
        let caption = "Dominant orders (all scores as published, and by sign), scores (mean ± standard deviation, extremes over heads), and \
                       entropy relative to its maximum";
        let mut table = Table::new(caption, columns);
        for layer in &self.layers {
            // The curve may still rise at the last computed order.
            let dominant = |which: Which| match layer.terms.as_ref().and_then(|terms| which(terms).dominant) {
                Some(order) if order + 1 == super::ORDERS => Cell::text(format!("≥ {order}")),
                order => Cell::maybe(order, |order| Cell::Number(order as f64, 0)),
            };
            let mut row = vec![Cell::Number(layer.layer as f64, 0)];
            row.extend(KINDS.map(|(_, _, which)| dominant(which)));
            let mean = |value: fn(&super::HeadSpectrum) -> f64| layer.mean(|head| Some(value(head))).unwrap_or(f64::NAN);
            row.push(Cell::MeanSd(mean(|head| head.scores.mean), mean(|head| head.scores.sd), 2));
            row.push(Cell::Number(layer.heads.iter().map(|head| head.scores.min).fold(f64::INFINITY, f64::min), 1));
            row.push(Cell::Number(layer.heads.iter().map(|head| head.scores.max).fold(f64::NEG_INFINITY, f64::max), 1));
            let share = layer.mean(|head| head.entropy.and_then(|entropy| entropy.share));
            row.push(share.map_or(Cell::Empty, |share| Cell::Amount(share, Unit::Percent)));
            table.rows.push(row);
        }
        table
    }

    /// The result: the order that the median head needs for an error of 1 %, or its error at the highest order, for the series around 0 and around the mean
    /// score of a row.
    pub fn conclusion(&self) -> String {
        let cuts: Vec<&CutFacts> = self.layers.iter().flat_map(|layer| &layer.heads).filter_map(|head| head.cut.as_ref()).collect();
        if cuts.is_empty() {
            return "No head has a Taylor series.".into();
        }
        let last = |error: &[Option<f64>]| error.last().copied().flatten().unwrap_or(f64::INFINITY);
        let around_zero = cuts.iter().map(|cut| (cut.order_for.one_percent, last(&cut.error))).collect();
        let around_mean: Vec<_> =
            cuts.iter().filter_map(|cut| cut.centered.as_ref()).map(|cut| (cut.order_for.one_percent, last(&cut.error))).collect();
        let (first, second) = (self.needed(around_zero), self.needed(around_mean));
        let insufficient = cuts.iter().filter(|cut| cut.order_for.one_percent.is_none()).count();
        let next = if 2 * insufficient > cuts.len() { NEXT } else { "" };
        match second {
            Some(second) => format!("Series around 0: {} Around the mean score of each row: {second}{next}", first.unwrap_or_default()),
            None => capitalized(&first.unwrap_or_default()) + next,
        }
    }

    /// One sentence about the order for an error of 1 % and the error at the highest order of each head.
    fn needed(&self, mut heads: Vec<(Option<usize>, f64)>) -> Option<String> {
        let most = self.orders.last().copied().unwrap_or(0);
        // `None` last: no order up to the highest is sufficient.
        heads.sort_by_key(|(order, _)| order.unwrap_or(usize::MAX));
        let beyond = heads.iter().filter(|(order, _)| order.is_none()).count();
        let share = format!("{:.0} %", 100.0 * beyond as f64 / heads.len().max(1) as f64);
        Some(match heads.get(heads.len() / 2)?.0 {
            Some(order) if beyond == 0 => {
                let worst = heads.last().and_then(|(order, _)| *order).unwrap_or(most);
                format!("the median head needs order {order} for an error of 1 %, the worst head order {worst}.")
            }
            Some(order) => format!("the median head needs order {order} for an error of 1 %; {share} of the heads need more than {most}."),
            None => {
                let mut errors: Vec<f64> = heads.iter().map(|(_, error)| *error).collect();
                errors.sort_by(f64::total_cmp);
                let median = errors[errors.len() / 2];
                let median = if median.is_finite() { Unit::Percent.format(median) } else { "outside the range of float64".into() };
                let who = if beyond == heads.len() { "no head reaches".into() } else { format!("{share} of the heads do not reach") };
                format!("at order {most} the median head still has an error of {median}; {who} 1 % at any order up to {most}.")
            }
        })
    }

    /// Number of tokens, windows and queries, in one sentence.
    pub fn scope(&self) -> String {
        let Spectrum { text, rows, .. } = self;
        let windows = counted(text.windows, "window");
        let which = match rows.sampled == rows.of {
            true => "all rows".into(),
            false => format!("{} of {} rows, drawn with seed {}", rows.sampled, rows.of, rows.seed),
        };
        format!("{} tokens in {windows} of at most {}; {which}; visible pairs only", thousands(text.tokens), text.length)
    }
}

impl Documented for Spectrum {
    const KIND: &'static str = "spectrum";

    /// The conclusion and its figures first, then tables.
    fn document(&self) -> Document {
        let figure = |name: &str, title: String, description: &str, panels: Vec<termwise_report::Panel>| Block::Figure {
            name: name.into(),
            figure: Figure { title, description: description.into(), panels },
            caption: String::new(),
        };
        let name = &self.model.name;
        let maps = KINDS.map(|(short, title, which)| {
            let about = "Heat map: layers from top to bottom, orders from left to right; colour: log10 of the mean magnitude.";
            figure(
                &format!("magnitude-map-{short}"),
                format!("{name}: magnitude of terms"),
                about,
                vec![self.magnitude_map(title, which).into()],
            )
        });
        let charts = KINDS.map(|(_, title, which)| self.magnitude_chart(title, which).into());
        let magnitudes = figure(
            "magnitude",
            format!("{name}: magnitude of terms"),
            "Three charts of the magnitude against the order, one line per layer: all scores, nonnegative scores, negative scores.",
            charts.to_vec(),
        );
        let error = figure(
            "error",
            format!("{name}: truncation error"),
            "The relative error of the heads' outputs against the truncation order, for the series around 0 and around the mean score of each row.",
            [
                self.error_chart("Series around 0: median head of each layer; band: all heads", |cut| Some(&cut.error)),
                self.error_chart("Series around the mean score of each row", |cut| Some(&cut.centered.as_ref()?.error)),
            ]
            .into_iter()
            .flatten()
            .map(Into::into)
            .collect(),
        );
        let orders = figure(
            "order-map",
            format!("{name}: orders that heads need"),
            "Heat map: layers from top to bottom, heads from left to right; colour: the order for an error of 1 %.",
            vec![self.order_map().into()],
        );
        let maps = Block::Details { summary: "Term magnitudes by layer and order (heat maps)".into(), blocks: maps.into() };
        let reached = self.order_map().values.iter().flatten().any(Option::is_some);
        let figures = [Some(error), reached.then_some(orders)].into_iter().flatten();
        let lead = [Block::Text(self.conclusion())].into_iter().chain(figures).chain([self.facts()]).collect();
        Document {
            title: format!("Term spectrum of {name}"),
            lead,
            sections: vec![
                Section::new("Orders that heads need", vec![Block::table("layers", self.orders_table()), Block::text(ERROR_CAPTION)]),
                Section::new(
                    "Magnitude of terms",
                    vec![Block::table("scores", self.scores_table()), magnitudes, Block::text(MAGNITUDE), maps],
                ),
            ],
        }
    }

    /// The conclusion, and the orders needed by the heads.
    fn summary(&self) -> Document {
        let lead = vec![Block::Text(self.conclusion()), self.facts(), Block::table("layers", self.brief_orders_table(SUMMARY_LAYERS))];
        let scores = Section::new("Magnitude of terms", vec![Block::table("scores", self.scores_table())]);
        Document { title: format!("Term spectrum of {}", self.model.name), lead, sections: vec![scores] }
    }
}

impl Spectrum {
    /// Model, text, and number of tokens.
    fn facts(&self) -> Block {
        let model = &self.model;
        let kv = if model.kv_heads == model.heads { String::new() } else { format!(" over {}", counted(model.kv_heads, "KV head")) };
        let mut facts = vec![
            (
                "model",
                format!(
                    "{} parameters, {}, {}{kv} of dimension {}",
                    thousands(model.parameters),
                    counted(self.layers.len(), "layer"),
                    counted(model.heads, "head"),
                    model.head_dim
                ),
            ),
            ("text", self.text.data.join(", ")),
            ("read", self.scope()),
        ];
        if let Some(Timing { forward, analysis }) = self.timing {
            facts.push((
                "time",
                format!("forward {forward:.2} s, analysis {analysis:.2} s: {:.2} forward passes", 1.0 + analysis / forward),
            ));
        }
        Block::Facts(facts.into_iter().map(|(name, text)| (name.into(), text)).collect())
    }
}

const ERROR_CAPTION: &str = "The error is RMS(y_p − y)/RMS(y) over sampled rows and coordinates of a head, y_p its output with its kernel \
    truncated at order p, and with its own denominator, gates, decay and norm. One head is truncated at a time; its inputs are those of the original model.";
const MAGNITUDE: &str = "The magnitude of order n is the mean of |xⁿ/n!| over the visible pairs of a head, then over the heads of a layer. The \
    published metric differs in two ways: it keeps the sign of order 1, and its mean includes masked pairs. It peaks at n ≈ |x|: large negative \
    scores, which softmax ignores, inflate it, so both signs are shown separately.";

#[cfg(test)]
mod tests {
    use super::super::*;
    use super::NEXT;

    /// Heads with these orders for 1 % and these errors at order 32, in one layer; the largest term is the last.
    fn spectrum(heads: &[(Option<usize>, Option<f64>)]) -> Spectrum {
        let magnitudes = Magnitudes { log10: (0..ORDERS).map(|n| Some(n as f64)).collect(), dominant: Some(ORDERS - 1) };
        let terms = Terms { all: magnitudes.clone(), positive: magnitudes.clone(), negative: magnitudes };
        let head = |(head, &(order, error)): (usize, &(Option<usize>, Option<f64>))| HeadSpectrum {
            head,
            attention: "exp over=sum".into(),
            pairs: 1,
            positive: None,
            scores: ScoreFacts { mean: 0.0, sd: 1.0, min: -1.0, max: 1.0 },
            entropy: None,
            terms: Some(terms.clone()),
            cut: Some(CutFacts {
                share: vec![None, None],
                error: vec![None, error],
                order_for: OrderFor { ten_percent: order, one_percent: order, tenth_percent: None },
                centered: order.map(|order| CenteredCut {
                    error: vec![None, error],
                    order_for: OrderFor { ten_percent: None, one_percent: Some(order / 2), tenth_percent: None },
                }),
            }),
        };
        let heads: Vec<HeadSpectrum> = heads.iter().enumerate().map(head).collect();
        Spectrum {
            model: ModelFacts { name: "test".into(), parameters: 1, heads: heads.len(), kv_heads: heads.len(), head_dim: 4 },
            text: TextFacts { data: vec!["book.txt".into()], windows: 1, length: 4, tokens: 4 },
            rows: RowFacts { sampled: 4, of: 4, seed: 0 },
            orders: vec![0, 32],
            layers: vec![LayerSpectrum { layer: 0, terms: Some(terms), heads }],
            timing: None,
        }
    }

    #[test]
    fn the_conclusion_comes_first_and_nothing_is_capped_silently() {
        use termwise_report::Documented;
        let text = |heads: &[(Option<usize>, Option<f64>)]| {
            spectrum(heads).document().to_terminal(&termwise_report::Terminal { width: 160, ..Default::default() })
        };
        let some = [(Some(12), Some(0.001)), (Some(12), Some(0.001)), (None, Some(0.5))];
        assert!(
            text(&some)
                .contains("Series around 0: the median head needs order 12 for an error of 1 %; 33 % of the heads need more than 32.")
        );
        assert!(text(&some[..2]).contains("needs order 12 for an error of 1 %, the worst head order 12."));
        assert!(
            spectrum(&some)
                .conclusion()
                .ends_with("Around the mean score of each row: the median head needs order 6 for an error of 1 %, the worst head order 6.")
        );
        let none = text(&[(None, Some(0.98)), (None, None)]);
        // Without a series around the mean of a row there is nothing to distinguish.
        let sentence = "At order 32 the median head still has an error of";
        assert!(none.contains(sentence) && none.contains("no head reaches 1 % at any order up to 32."), "{none}");
        assert!(spectrum(&[(None, Some(0.98)), (None, None)]).conclusion().ends_with(NEXT) && !spectrum(&some).conclusion().contains(NEXT));
        let document = spectrum(&some).document();
        assert!(
            matches!(document.lead[..2], [termwise_report::Block::Text(_), termwise_report::Block::Figure { .. }]),
            "the figure is second"
        );
        let brief = spectrum(&some).summary().to_terminal(&termwise_report::Terminal { width: 100, ..Default::default() });
        assert!(brief.lines().count() <= 25 && brief.contains("≥ 99"), "{brief}");
        for words in ["≥ 99", "> 32", "overflow"] {
            assert!(none.contains(words), "{words}: {none}");
        }
        assert!(text(&[(None, Some(0.98))]).contains("98"), "the error at the highest order");
        // A model with many layers: the table of the summary has some of them.
        let mut deep = spectrum(&some);
        deep.layers = (0..30).map(|layer| LayerSpectrum { layer, ..deep.layers[0].clone() }).collect();
        let (brief, left_out) = deep.summary().to_terminal_brief(&termwise_report::Terminal { width: 100, ..Default::default() });
        assert!(brief.contains("(5 of 30") && left_out > 0 && brief.lines().count() < 25, "{brief}");
        for layer in ["\n    0  ", "\n   14  ", "\n   29  "] {
            assert!(brief.contains(layer), "{layer:?}: {brief}");
        }
        assert_eq!(deep.orders_table().rows.len(), 30);
    }
}
