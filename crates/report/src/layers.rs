//! Drawing of chart layers.

use crate::chart::{Band, Chart, Frame, Layer, Line, Mark, Points, Runs};
use crate::draw::{self, Drawing, Look, Path, Place, Step};
use crate::{labels, rules};

/// Half length of the caps of an error bar.
const CAP: f64 = 6.0;
/// Radius of the dot at the end of a run.
const END_RADIUS: f64 = 2.75;

impl Layer {
    /// Values that the axes must include. A rule has only a y value.
    pub(crate) fn places(&self) -> Vec<(f64, f64)> {
        match self {
            Layer::Line(line) => line.points.clone(),
            Layer::Mark(mark) => vec![(mark.x, mark.y)],
            Layer::Band(band) => band.points.iter().flat_map(|&(x, low, high)| [(x, low), (x, high)]).collect(),
            Layer::Points(points) => {
                let ends = |p: &crate::Point| [Some(p.y), p.interval.map(|s| s.0), p.interval.map(|s| s.1)];
                points.points.iter().flat_map(|p| ends(p).into_iter().flatten().map(|y| (p.x, y))).collect()
            }
            Layer::Rule(_) => Vec::new(),
            Layer::Runs(runs) => runs.ends().map(|(_, end)| end).collect(),
        }
    }

    /// Sampled positions of the layer, used to keep labels away from it.
    pub(crate) fn trace(&self, frame: &Frame) -> Vec<Place> {
        let places: Vec<Option<Place>> = self.places().into_iter().map(|(x, y)| frame.place(x, y)).collect();
        match self {
            Layer::Line(_) => {
                places.split(Option::is_none).flat_map(|run| rules::trace(&run.iter().flatten().copied().collect::<Vec<_>>())).collect()
            }
            Layer::Points(points) => {
                let bar = |point: &crate::Point| {
                    let (low, high) = point.interval.unwrap_or((point.y, point.y));
                    Some(rules::trace(&[frame.place(point.x, low)?, frame.place(point.x, high)?]))
                };
                points.points.iter().filter_map(bar).flatten().collect()
            }
            _ => places.into_iter().flatten().collect(),
        }
    }

    pub(crate) fn draw(&self, drawing: &mut Drawing, chart: &Chart, frame: &Frame) {
        match self {
            Layer::Line(line) => line.draw(drawing, frame),
            Layer::Mark(mark) => mark.draw(drawing, frame),
            Layer::Band(band) => band.draw(drawing, frame),
            Layer::Points(points) => points.draw(drawing, chart, frame),
            Layer::Rule(rule) => rule.draw(drawing, frame),
            Layer::Runs(runs) => runs.draw(drawing, chart, frame),
        }
    }
}

impl Line {
    pub(crate) fn look(&self) -> Look {
        Look::Line { color: self.color, dashed: self.dashed }
    }

    fn draw(&self, drawing: &mut Drawing, frame: &Frame) {
        let mut steps = Vec::with_capacity(self.points.len() + 1);
        let mut drawing_now = false;
        for &(x, y) in &self.points {
            let place = frame.place(x, y);
            match place {
                Some(place) if drawing_now => steps.push(Step::Line(place)),
                // A point without neighbours is drawn as a dot by its round line caps.
                Some(place) => steps.extend([Step::Move(place), Step::Dot]),
                None => {}
            }
            drawing_now = place.is_some();
        }
        if !steps.is_empty() {
            drawing.path(self.look(), Path(steps), Some(&self.name));
        }
    }
}

impl Band {
    fn draw(&self, drawing: &mut Drawing, frame: &Frame) {
        let mut steps = Vec::new();
        let place = |&(x, low, high): &(f64, f64, f64)| Some((frame.place(x, low)?, frame.place(x, high)?));
        for run in self.points.iter().map(place).collect::<Vec<_>>().split(Option::is_none) {
            let (low, mut high): (Vec<Place>, Vec<Place>) = run.iter().flatten().copied().unzip();
            high.reverse();
            steps.extend(Path::polygon(&[low, high].concat()).0);
        }
        if !steps.is_empty() {
            drawing.path(Look::Band(self.color), Path(steps), Some(&self.name));
        }
    }
}

impl Points {
    fn draw(&self, drawing: &mut Drawing, chart: &Chart, frame: &Frame) {
        for point in &self.points {
            let Some((x, y)) = frame.place(point.x, point.y) else { continue };
            let names: Vec<&str> = [self.name.as_str(), point.name.as_str()].into_iter().filter(|n| !n.is_empty()).collect();
            let at = format!("{}, {}", chart.x.unit.exact(point.x), chart.y.unit.exact(point.y));
            let title = if names.is_empty() { at } else { format!("{}: {at}", names.join(", ")) };
            draw::marker(drawing, self.color, (x, y), Some(&title));
            if let Some((low, high)) = point.interval.filter(|(low, high)| low < high) {
                let (low, high) = (frame.clipped(low), frame.clipped(high));
                let caps = [((x - CAP, low), (x + CAP, low)), ((x - CAP, high), (x + CAP, high)), ((x, low), (x, high))];
                drawing.path(Look::Whisker(self.color), Path::segments(&caps), None);
            }
        }
    }
}

impl Runs {
    /// The name and last point of each run.
    pub(crate) fn ends(&self) -> impl Iterator<Item = (&str, (f64, f64))> {
        self.runs.iter().filter_map(|(name, points)| Some((name.as_str(), *points.last()?)))
    }

    fn draw(&self, drawing: &mut Drawing, chart: &Chart, frame: &Frame) {
        // A single run coincides with its line.
        for (name, (x, y)) in self.ends().filter(|_| self.runs.len() > 1) {
            let Some(place) = frame.place(x, y) else { continue };
            let title = format!("{}, {name}: {}", self.name, chart.y.unit.exact(y));
            drawing.path(Look::Dot(self.color), Path::circle(place, END_RADIUS), Some(&title));
        }
    }
}

impl Mark {
    /// The point, and a vertical line to the axis.
    fn draw(&self, drawing: &mut Drawing, frame: &Frame) {
        let Some((x, y)) = frame.place(self.x, self.y) else { return };
        drawing.segment(Look::Drop(self.color), (x, y), (x, frame.bottom));
        drawing.path(Look::Dot(self.color), Path::circle((x, y), labels::DOT), Some(&self.label));
    }
}
