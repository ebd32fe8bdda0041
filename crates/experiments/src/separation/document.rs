//! Document of success probabilities and orders.

use serde::{Deserialize, Serialize};
use termwise_report::{Block, Cell, Document, Documented, Section, Table, Tone, thousands};

use super::{
    BridgePoint, Compared, ComparedOrder, MAX_BRIDGE_ORDER, Point, REFERENCE_DRAWS, REQUIRED_PROBABILITY, Reference, Series, Setting,
    Verdict,
};
use super::{bridge_figure, success_figure};

/// The results.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Separation {
    /// The basis of the statement.
    pub note: String,
    /// Seed of the draws.
    pub seed: u64,
    /// Comparison with the reference figures.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reference: Option<Reference>,
    /// Success probabilities.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub points: Vec<Point>,
    /// Smallest orders.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub bridge: Vec<BridgePoint>,
}

impl Documented for Separation {
    const KIND: &'static str = "separation";

    fn document(&self) -> Document {
        let note = format!(
            "{}{}.",
            self.note.chars().next().map_or(String::new(), |c| c.to_uppercase().collect()),
            self.note.get(1..).unwrap_or("")
        );
        let mut sections = Vec::new();
        if let Some(reference) = &self.reference {
            sections.extend(of_reference(reference, self.seed));
        }
        if let Some(first) = self.points.first() {
            let text = format!("{}; {} draws, seed {}.", common(&first.setting), thousands(first.share.draws), self.seed);
            let figure = Block::figure("success", success_figure(&self.points));
            sections.push(Section::new("Success", vec![Block::Text(text), Block::table("success", points(&self.points)), figure]));
        }
        if let Some(first) = self.bridge.first() {
            let text = format!("{}, d = {}. {}", common(&first.setting), first.setting.d, rule());
            let figure = Block::figure("bridge", bridge_figure(&self.bridge));
            let heading = format!("Smallest order with a success of at least {REQUIRED_PROBABILITY}");
            sections.push(Section::new(heading, vec![Block::Text(text), Block::table("bridge", bridge(&self.bridge)), figure]));
        }
        Document { title: "Softmax/linear separation".into(), lead: vec![Block::Text(note)], sections }
    }
}

fn common(setting: &Setting) -> String {
    let Setting { a0, b, c, cross, .. } = setting;
    format!("a_0 = {a0}, b = {b}, c = {c}, {}-attention", if *cross { "cross" } else { "self" })
}

fn rule() -> String {
    format!(
        "Orders are tried upwards from 0 to {MAX_BRIDGE_ORDER}; the first whose probability in closed form reaches {REQUIRED_PROBABILITY} is taken."
    )
}

/// Exact probability, success rate of the draws and its interval.
fn shares(point: &Point) -> [Cell; 4] {
    [point.exact, point.share.success, point.share.low, point.share.high].map(|x| Cell::Number(x, 4))
}

fn points(points: &[Point]) -> Table {
    let mut table = Table::new("", ["network", "n", "d", "m", "a_1", "exact", "success", "95 % from", "to"]);
    for point in points {
        let Setting { n, d, m, a1, .. } = point.setting;
        let cells = [Cell::code(point.network.to_string()), Cell::Count(n), Cell::count(d), Cell::count(m), shortest(a1)];
        table.rows.push(cells.into_iter().chain(shares(point)).collect());
    }
    table
}

/// As requested.
fn shortest(x: f64) -> Cell {
    let digits = x.to_string().split_once('.').map_or(0, |(_, digits)| digits.len());
    Cell::Number(x, digits)
}

fn bridge(points: &[BridgePoint]) -> Table {
    let columns = [
        "a_1",
        "n",
        "m",
        "ln n/ln(1+a_1)",
        "Taylor order",
        "Taylor exact",
        "Taylor success",
        "power order",
        "power exact",
        "power success",
    ];
    let mut table = Table::new("", columns);
    for pair in points.chunks(2) {
        let Setting { n, m, a1, .. } = pair[0].setting;
        let mut cells = vec![shortest(a1), Cell::Count(n), Cell::count(m), Cell::Number(pair[0].predicted, 1)];
        for found in pair {
            let of = |value: fn(&Point) -> f64| Cell::maybe(found.point.as_ref(), |point| Cell::Number(value(point), 3));
            cells.extend([found.order.map_or(Cell::text("none"), Cell::count), of(|point| point.exact), of(|point| point.share.success)]);
        }
        table.rows.push(cells);
    }
    table
}

fn of_reference(reference: &Reference, seed: u64) -> Vec<Section> {
    let Some(first) = reference.figures.first() else { return Vec::new() };
    let (rest, draws) = (common(&first.point.setting), thousands(first.point.share.draws));
    let text = format!("F = 0 on D_0 and F > 0 on D_1. {rest}, d = {}; {draws} draws, seed {seed}.", first.point.setting.d);
    let mut table = Table::new("", ["network", "a_1", "n", "m", "reference", "exact", "success", "95 % from", "to", "remark"]);
    for Compared { reference, verdict, point } in &reference.figures {
        let Setting { n, m, a1, .. } = point.setting;
        let cells = [Cell::code(point.network.to_string()), shortest(a1), Cell::Count(n), Cell::count(m), Cell::Number(*reference, 2)];
        table.rows.push(cells.into_iter().chain(shares(point)).chain([Cell::text(verdict.word())]).collect());
    }
    let columns = ["a_1", "n", "m", "ln n/ln(1+a_1)", "reference", "found", "exact there, one below", "remark"];
    let mut orders = Table::new("Taylor / power", columns);
    for pair in reference.orders.chunks(2) {
        let Setting { n, m, a1, .. } = pair[0].found.setting;
        let both = |show: &dyn Fn(&ComparedOrder) -> String| Cell::text(pair.iter().map(show).collect::<Vec<_>>().join(" / "));
        let exact = |row: &ComparedOrder| {
            let at = row.found.point.as_ref().map_or("–".into(), |point| format!("{:.3}", point.exact));
            format!("{at}, {}", row.found.below.map_or("–".into(), |x| format!("{x:.3}")))
        };
        let remark = |verdict: Verdict| {
            let rows = pair.iter().filter(|row| row.verdict == verdict);
            let names: Vec<&str> = rows.map(|row| if row.found.series == Series::Taylor { "Taylor" } else { "power" }).collect();
            (!names.is_empty()).then(|| format!("{}: {}", names.join(", "), verdict.word()))
        };
        let remarks: Vec<String> = [Verdict::Chance, Verdict::Differs].into_iter().filter_map(remark).collect();
        orders.rows.push(vec![
            shortest(a1),
            Cell::Count(n),
            Cell::count(m),
            Cell::Number(pair[0].found.predicted, 1),
            both(&|row| row.reference.to_string()),
            both(&|row| row.found.order.map_or("none".into(), |order| order.to_string())),
            both(&exact),
            Cell::text(remarks.join("; ")),
        ]);
    }
    let all = reference.figures.iter().map(|row| row.verdict).chain(reference.orders.iter().map(|row| row.verdict));
    let count = |verdict: Verdict| all.clone().filter(|found| *found == verdict).count();
    let [agrees, chance, differs] = [Verdict::Agrees, Verdict::Chance, Verdict::Differs].map(count);
    let tone = if differs == 0 { Tone::Good } else { Tone::Bad };
    let about = format!(
        "Reference figures have two digits and an unknown number of draws: \"chance\" is outside the interval, or another order, but within the \
         95 % interval of {REFERENCE_DRAWS} draws; with 300, 0.70 at m = 5 would differ. All 24 orders match with m = ⌊log₂(n/0.01)⌋, which was found by \
         a search for an m that fits them. exact is the probability in closed form."
    );
    let verdict =
        Block::badge(tone, format!("{agrees} agree"), format!("with the reference figures, {chance} within chance, {differs} differ"));
    vec![
        Section::new("Success", vec![Block::Text(text), Block::table("reference", table)]),
        Section::new(
            format!("The bridge: smallest order with a success of at least {REQUIRED_PROBABILITY}"),
            vec![Block::Text(rule()), Block::table("reference-bridge", orders), Block::Text(about), verdict],
        ),
    ]
}

impl Verdict {
    fn word(self) -> &'static str {
        match self {
            Verdict::Agrees => "",
            Verdict::Chance => "chance",
            Verdict::Differs => "differs",
        }
    }
}
