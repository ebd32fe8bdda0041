//! Figures of success probabilities and orders.

use termwise_report::{Axis, Chart, Figure, Layer, Line, Mark, Scale, Unit};

use super::{BridgePoint, Network, Point, RECONSTRUCTION, REQUIRED_PROBABILITY, Series};

/// The variables of a sweep, in the order in which one is chosen for the axis.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Variable {
    N,
    Spike,
    M,
    D,
    Order,
}

impl Variable {
    const ALL: [Variable; 5] = [Variable::N, Variable::Spike, Variable::M, Variable::D, Variable::Order];

    fn of(self, point: &Point) -> f64 {
        match self {
            Variable::N => point.setting.n as f64,
            Variable::Spike => point.setting.a1,
            Variable::M => point.setting.m as f64,
            Variable::D => point.setting.d as f64,
            Variable::Order => match point.network {
                Network::Power(p) | Network::Taylor(p) => p as f64,
                Network::Softmax | Network::Linear => f64::NAN,
            },
        }
    }

    fn symbol(self) -> &'static str {
        match self {
            Variable::N => "n",
            Variable::Spike => "a₁",
            Variable::M => "m",
            Variable::D => "d",
            Variable::Order => "order",
        }
    }

    fn label(self) -> &'static str {
        match self {
            Variable::N => "n, rows",
            Variable::Spike => "a₁, the spike of D₁",
            Variable::M => "m, vectors of the readout",
            Variable::D => "d, columns",
            Variable::Order => "order p",
        }
    }

    fn values(self, points: &[Point]) -> Vec<f64> {
        let mut values: Vec<f64> = points.iter().map(|point| self.of(point)).filter(|x| x.is_finite()).collect();
        values.sort_by(f64::total_cmp);
        values.dedup();
        values
    }
}

/// The success rates over n if there are several n, otherwise over a_1, m, d or the order; one line per network and
/// per value of the other variables. Lines connect the simulated rates; the points have intervals.
pub fn success_figure(points: &[Point]) -> Figure {
    let axis = Variable::ALL.into_iter().find(|variable| variable.values(points).len() > 1).unwrap_or(Variable::N);
    let mut names: Vec<String> = Vec::new();
    for name in points.iter().map(|point| name(point, axis, points)) {
        if !names.contains(&name) {
            names.push(name);
        }
    }
    // The first colour is for the baseline.
    names.sort_by_key(|name| !name.starts_with("softmax"));
    let first = !names.first().is_some_and(|name| name.starts_with("softmax")) as usize;
    let line = |(i, line_name): (usize, &String)| {
        let own = points.iter().filter(|point| name(point, axis, points) == *line_name);
        let places = own.flat_map(|point| match axis.of(point) {
            // A network without an order is constant over orders.
            x if x.is_nan() => axis.values(points).iter().map(|&x| (x, point.share.success)).collect(),
            x => vec![(x, point.share.success)],
        });
        let mut places: Vec<(f64, f64)> = places.collect();
        places.sort_by(|p, q| p.0.total_cmp(&q.0));
        let color = first + i;
        Layer::Line(Line { name: line_name.clone(), color, dashed: line_name.starts_with("taylor") || color >= 6, points: places })
    };
    let layers = names.iter().enumerate().map(line).collect();
    let scale = match axis.values(points).as_slice() {
        [first, .., last] if axis != Variable::Order && last / first >= 20.0 => Scale::Log,
        _ => Scale::Linear,
    };
    let fixed = fixed(points, axis);
    let chart = Chart {
        title: format!("Success against {}{fixed}", axis.symbol()),
        x: Axis::new(axis.label(), scale, Unit::Number),
        y: Axis::new("fraction of draws with F = 0 on D₀ and F > 0 on D₁", Scale::Linear, Unit::Number),
        layers,
    };
    let mut description = format!("This is {RECONSTRUCTION}. ");
    for name in &names {
        let ends = chart.layers.iter().find_map(|layer| match layer {
            Layer::Line(line) if line.name == *name => Some((line.points.first()?, line.points.last()?)),
            _ => None,
        });
        if let Some((first, last)) = ends {
            let (symbol, from, to) = (axis.symbol(), Unit::Number.format(first.0), Unit::Number.format(last.0));
            description += &format!("{name}: {:.2} at {symbol} = {from}, {:.2} at {symbol} = {to}. ", first.1, last.1);
        }
    }
    let title = "Success of networks in detecting the spike (a reconstruction)".into();
    Figure { title, description: description.trim_end().into(), panels: vec![chart.into()] }
}

/// The network and the other variables that distinguish points at one position of the axis.
fn name(point: &Point, axis: Variable, points: &[Point]) -> String {
    let mut name = match point.network {
        Network::Power(_) if axis == Variable::Order => "power".to_owned(),
        Network::Taylor(_) if axis == Variable::Order => "taylor".to_owned(),
        network => network.to_string(),
    };
    for variable in [Variable::N, Variable::Spike, Variable::M, Variable::D] {
        // The default m follows n, and is then not a separate variable.
        let varies = |other: &Point| other.setting.n == point.setting.n && variable.of(other) != variable.of(point);
        if variable != axis && points.iter().any(varies) {
            name += &format!(", {} = {}", variable.symbol(), Unit::Number.format(variable.of(point)));
        }
    }
    name
}

/// The variables with the same value for all points.
fn fixed(points: &[Point], axis: Variable) -> String {
    let same = [Variable::N, Variable::Spike, Variable::D, Variable::M].into_iter().filter(|variable| *variable != axis);
    let text = same.filter_map(|variable| match variable.values(points).as_slice() {
        [value] => Some(format!(", {} = {}", variable.symbol(), Unit::Number.format(*value))),
        _ => None,
    });
    text.collect()
}

/// Smallest orders with a success of at least [`REQUIRED_PROBABILITY`] over n, for each a_1, with ln n / ln(1 + a_1).
pub fn bridge_figure(points: &[BridgePoint]) -> Figure {
    let mut spikes: Vec<f64> = points.iter().map(|point| point.setting.a1).collect();
    spikes.sort_by(f64::total_cmp);
    spikes.dedup();
    let mut description = format!("This is {RECONSTRUCTION}. ");
    let chart = |a1: f64| {
        let line = |series: Series, value: &dyn Fn(&BridgePoint) -> f64| -> Vec<(f64, f64)> {
            let own = points.iter().filter(|point| point.series == series && point.setting.a1 == a1);
            let mut line: Vec<(f64, f64)> = own.map(|point| (point.setting.n as f64, value(point))).collect();
            line.sort_by(|p, q| p.0.total_cmp(&q.0));
            line
        };
        let order = |point: &BridgePoint| point.order.map_or(f64::NAN, f64::from);
        let (taylor, power) = (line(Series::Taylor, &order), line(Series::Power, &order));
        for (name, found) in [("Taylor", &taylor), ("power", &power)] {
            let list: Vec<String> = found.iter().map(|(n, p)| format!("{p} at n = {}", Unit::Number.format(*n))).collect();
            description += &format!("a₁ = {a1}, {name}: {}. ", list.join(", "));
        }
        let marks = taylor.last().map(|&(x, y)| Layer::Mark(Mark { x, y, label: format!("{y}"), color: 3 }));
        let lines = [
            Line { name: "ln n / ln(1 + a₁)".into(), color: 0, dashed: false, points: line(Series::Taylor, &|point| point.predicted) },
            Line { name: "single power p".into(), color: 2, dashed: false, points: power },
            // Drawn last: they often coincide.
            Line { name: "Taylor, orders 0..p".into(), color: 3, dashed: true, points: taylor },
        ];
        Chart {
            title: format!("a₁ = {a1}"),
            x: Axis::new("n, rows", Scale::Log, Unit::Number),
            y: Axis::new(format!("smallest order p with success ≥ {REQUIRED_PROBABILITY}"), Scale::Linear, Unit::Number),
            layers: lines.into_iter().map(Layer::Line).chain(marks).collect(),
        }
    };
    let panels = spikes.into_iter().map(chart).map(Into::into).collect();
    let title = "Order of the exponential series required for success (a reconstruction)".into();
    Figure { title, description: description.trim_end().into(), panels }
}
