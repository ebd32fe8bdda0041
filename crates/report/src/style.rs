//! Styles of shapes and text as CSS for SVG and as paint for PNG, from one table.

use crate::colour::{self, Colours, RAMP, RAMP_START, Rgb, SERIES, Theme};
use crate::draw::{Face, Look};

/// Fill and stroke of a shape in a theme.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Paint {
    pub fill: Option<Rgb>,
    /// Opacity of the fill.
    pub opacity: f64,
    pub stroke: Option<Rgb>,
    pub width: f64,
    pub dash: Option<(f64, f64)>,
    /// Round caps and joins.
    pub round: bool,
    /// Edges snapped to pixels, so adjacent shapes have no seam.
    pub crisp: bool,
}

impl Look {
    /// The CSS class; empty if the paint is written as attributes.
    pub fn class(self) -> String {
        match self {
            Look::Grid => "grid".into(),
            Look::Axis => "axis".into(),
            Look::Line { color, dashed } => format!("line c{}{}", colour::index(color), if dashed { " dashed" } else { "" }),
            Look::Band(color) => format!("band c{}", colour::index(color)),
            Look::Drop(color) => format!("drop c{}", colour::index(color)),
            Look::Dot(color) => format!("dot c{}", colour::index(color)),
            Look::Whisker(color) => format!("whisker c{}", colour::index(color)),
            Look::Rule(color) => format!("rule c{}", colour::index(color)),
            Look::Blank => "blank".into(),
            Look::Cell(_) => String::new(),
        }
    }

    pub fn paint(self, colours: &Colours) -> Paint {
        let stroke = |color: Rgb, width: f64| Paint { stroke: Some(color), width, ..Paint::default() };
        let fill = |color: Rgb, opacity: f64| Paint { fill: Some(color), opacity, ..Paint::default() };
        match self {
            Look::Grid => stroke(colours.grid, 1.0),
            Look::Axis => stroke(colours.quiet, 1.0),
            Look::Blank => stroke(colours.quiet, 0.75),
            Look::Line { color, dashed } => Paint { dash: dashed.then_some((6.0, 5.0)), round: true, ..stroke(colours.of(color), 2.25) },
            Look::Band(color) => fill(colours.of(color), 0.18),
            Look::Drop(color) => Paint { dash: Some((2.0, 3.0)), ..stroke(colours.of(color), 1.0) },
            Look::Dot(color) => Paint { stroke: Some(colours.background), width: 1.5, ..fill(colours.of(color), 1.0) },
            Look::Whisker(color) => stroke(colours.of(color), 1.5),
            Look::Rule(color) => Paint { dash: Some((7.0, 4.0)), ..stroke(colours.of(color), 1.25) },
            Look::Cell(color) => Paint { crisp: true, ..fill(color, 1.0) },
        }
    }
}

/// Width of the halo around text over lines.
pub const HALO: f64 = 4.0;

impl Face {
    pub fn class(self) -> String {
        match self {
            Face::Title => "title".into(),
            Face::Heading => "chart".into(),
            Face::Body => String::new(),
            Face::Quiet => "quiet".into(),
            Face::TickX => "quiet x".into(),
            Face::TickY => "quiet y".into(),
            Face::Mark(color) => format!("mark c{}", colour::index(color)),
            Face::Cell { white } => if white { "cell white" } else { "cell black" }.into(),
        }
    }

    pub fn color(self, colours: &Colours) -> Rgb {
        match self {
            Face::Title | Face::Heading | Face::Body => colours.text,
            Face::Quiet | Face::TickX | Face::TickY => colours.quiet,
            Face::Mark(color) => colours.of(color),
            Face::Cell { white } => [if white { 255 } else { 0 }; 3],
        }
    }

    pub fn has_halo(self) -> bool {
        matches!(self, Face::Mark(_))
    }
}

/// The style sheet of figures in these themes. Every rule applies only inside an element of the class `termwise`.
pub fn sheet(themes: &[Theme]) -> String {
    let mut css = String::from(
        "svg.termwise{max-width:100%;height:auto}\
         .termwise text{font-family:system-ui,-apple-system,\"Segoe UI\",Roboto,\"DejaVu Sans\",sans-serif}\
         .termwise .cells{shape-rendering:crispEdges}.termwise .blank{shape-rendering:auto}",
    );
    for &theme in themes {
        let colours = theme.colours();
        let mut rules = format!(".termwise .background{{fill:{}}}", colour::code(colours.background));
        for (class, look) in looks() {
            rules += &format!(".termwise {class}{{{}}}", look_rule(&look.paint(colours), theme));
        }
        for (selector, face) in faces() {
            rules += &format!(".termwise {selector}{{{}}}", face_rule(face, colours, theme));
        }
        css += &if theme == Theme::Dark { format!("@media (prefers-color-scheme:dark){{{rules}}}") } else { rules };
    }
    css
}

/// Series colours as CSS variables, for drawing on a canvas.
pub fn variables() -> String {
    let of = |theme: Theme| {
        let series = theme.colours().series.iter().enumerate().map(|(i, color)| format!("--s{i}:{};", colour::code(*color)));
        format!(":root{{{}}}", series.collect::<String>())
    };
    format!("{}@media (prefers-color-scheme:dark){{{}}}", of(Theme::Light), of(Theme::Dark))
}

/// One number for each colour of the palette.
fn palette() -> impl Iterator<Item = usize> {
    (0..SERIES).chain((0..RAMP).map(|step| RAMP_START + step))
}

/// Every style with a class, with its selector.
fn looks() -> Vec<(String, Look)> {
    let mut looks = vec![Look::Grid, Look::Axis, Look::Blank];
    for color in palette() {
        looks.extend([Look::Line { color, dashed: false }, Look::Band(color), Look::Drop(color), Look::Dot(color)]);
        looks.extend([Look::Whisker(color), Look::Rule(color)]);
    }
    looks.push(Look::Line { color: 0, dashed: true });
    let selector = |look: Look| match look {
        Look::Line { dashed: true, .. } => ".dashed".into(),
        look => format!(".{}", look.class().replace(' ', ".")),
    };
    looks.into_iter().map(|look| (selector(look), look)).collect()
}

fn faces() -> Vec<(String, Face)> {
    let mut faces = vec![("text".into(), Face::Body), (".title".into(), Face::Title), (".chart".into(), Face::Heading)];
    faces.push((".quiet".into(), Face::Quiet));
    faces.extend(palette().map(|color| (format!(".mark.c{}", colour::index(color)), Face::Mark(color))));
    faces.extend([true, false].map(|white| (if white { ".white" } else { ".black" }.into(), Face::Cell { white })));
    faces
}

/// Only colours for the dark theme: everything else is the same.
fn look_rule(paint: &Paint, theme: Theme) -> String {
    let dash = paint.dash.map(|(on, off)| format!("stroke-dasharray:{on} {off};")).unwrap_or_default();
    if paint.dash == Some((6.0, 5.0)) {
        return dash;
    }
    let mut css = format!("fill:{};", paint.fill.map_or("none".into(), colour::code));
    if let Some(stroke) = paint.stroke {
        css += &format!("stroke:{};", colour::code(stroke));
    }
    if theme == Theme::Light {
        if paint.opacity > 0.0 && paint.opacity < 1.0 {
            css += &format!("fill-opacity:{};", paint.opacity);
        }
        if paint.stroke.is_some() {
            css += &format!("stroke-width:{};{dash}", paint.width);
        }
        if paint.round {
            css += "stroke-linejoin:round;stroke-linecap:round;";
        }
    }
    css
}

fn face_rule(face: Face, colours: &Colours, theme: Theme) -> String {
    let (size, bold) = face.font();
    let mut css = format!("fill:{};", colour::code(face.color(colours)));
    if face.has_halo() {
        css += &format!("stroke:{};", colour::code(colours.background));
    }
    if theme == Theme::Light {
        css += &format!("font-size:{size}px;{}", if bold { "font-weight:600;" } else { "" });
        if face.has_halo() {
            css += &format!("stroke-width:{HALO};stroke-linejoin:round;paint-order:stroke;");
        }
    }
    css
}
