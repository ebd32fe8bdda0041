//! Rendering of documents as HTML.

use std::collections::{BTreeMap, HashSet};

use serde::Serialize;

use crate::colour::Theme;
use crate::data::FigureData;
use crate::document::{Block, Document, Section, Tone};
use crate::embed;
use crate::figure::Figure;
use crate::markup;
use crate::style;
use crate::svg::escape;
use crate::table::Table;

/// The style sheet of HTML reports.
const SHEET: &str = include_str!("document.css");

/// The script of interactive figures, `Figures`. It is also valid as XML text.
pub const FIGURES: &str = concat!("//<![CDATA[\n", include_str!("figures.js"), "//]]>\n");

/// The style sheet of HTML reports, for pages with other content.
pub fn style_sheet() -> String {
    SHEET.replace('\n', "") + &style::variables()
}

/// The data of the script: figures by anchor.
#[derive(Serialize)]
struct Data<'a> {
    figures: BTreeMap<&'a str, FigureData<'a>>,
}

/// A figure or table that is also written as a file, with its name.
pub enum Asset<'a> {
    Figure(String, &'a Figure),
    Table(String, &'a Table),
}

/// State of the renderer.
pub struct Renderer<'a> {
    out: String,
    /// Anchors in use.
    ids: HashSet<String>,
    /// Anchors of figures.
    figures: Vec<(String, &'a Figure)>,
    assets: Vec<Asset<'a>>,
    /// Whether figures and tables are also written as files.
    files: bool,
}

impl Document {
    /// The document as one self-contained HTML file, without external scripts, fonts or images. Figures are interactive;
    /// without JavaScript and in print they are static SVG.
    pub fn to_html(&self) -> String {
        Renderer::render(self, false).0
    }
}

impl<'a> Renderer<'a> {
    /// The HTML and the separate files, in document order.
    pub fn render(page: &'a Document, files: bool) -> (String, Vec<Asset<'a>>) {
        // Anchors of the script, which fills these elements.
        let taken = ["data", "choose"].map(String::from);
        let mut r = Renderer { out: String::new(), ids: taken.into(), figures: Vec::new(), assets: Vec::new(), files };
        let title = escape(&page.title);
        r.out += "<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"/>\n";
        r.out += "<meta name=\"viewport\" content=\"width=device-width,initial-scale=1\"/><meta name=\"color-scheme\" content=\"light dark\"/>\n";
        let script: &[&str] = if page.has_figures() { &[FIGURES] } else { &[] };
        let sheet = style_sheet() + &style::sheet(&Theme::ALL);
        // Nothing is fetched and no other script runs, even if a string contains markup.
        r.out +=
            &format!("<meta http-equiv=\"Content-Security-Policy\" content=\"{}\"/>\n", embed::policy(script, &embed::hash(&sheet), false));
        r.out += &format!("<title>{title}</title>\n<style>{sheet}</style></head>\n");
        r.out += &format!("<body><main><header><h1>{title}</h1>\n");
        r.blocks(&page.lead);
        if !script.is_empty() {
            r.out += "<div id=\"choose\"></div>\n";
        }
        r.out += "</header>\n";
        let ids: Vec<String> = page.sections.iter().map(|section| r.id(&slug(&section.heading))).collect();
        if page.sections.len() > 1 {
            r.out += "<nav aria-label=\"Contents\"><h2>Contents</h2><ol>";
            for (section, id) in page.sections.iter().zip(&ids) {
                r.out += &format!("<li><a href=\"#{id}\">{}</a></li>", markup::html(&section.heading));
            }
            r.out += "</ol></nav>\n";
        }
        for (Section { heading, blocks }, id) in page.sections.iter().zip(&ids) {
            r.out += &format!("<section id=\"{id}\"><h2>{}", markup::html(heading));
            r.out += &format!(" <a class=\"anchor\" href=\"#{id}\" aria-label=\"Link to this section\">#</a></h2>\n");
            r.blocks(blocks);
            r.out += "</section>\n";
        }
        r.out += "</main>\n";
        if !script.is_empty() {
            let figures = r.figures.iter().map(|(id, figure)| (id.as_str(), FigureData::new(figure))).collect();
            let data = embed::json_for_script(&Data { figures });
            r.out += &format!("<script type=\"application/json\" id=\"data\">{data}</script>\n<script>{FIGURES}</script>\n");
        }
        r.out += "</body></html>\n";
        (r.out, r.assets)
    }

    /// A unique anchor.
    fn id(&mut self, wanted: &str) -> String {
        let numbered = |n: u32| if n == 1 { wanted.to_string() } else { format!("{wanted}-{n}") };
        let id = (1..).map(numbered).find(|id| !self.ids.contains(id)).unwrap_or_default();
        self.ids.insert(id.clone());
        id
    }

    /// Consecutive figures share a box.
    fn blocks(&mut self, blocks: &'a [Block]) {
        for run in blocks.chunk_by(|a, b| matches!((a, b), (Block::Figure { .. }, Block::Figure { .. }))) {
            if matches!(run[0], Block::Figure { .. }) {
                let class = match run.len() {
                    1 => "figures one",
                    3 => "figures three",
                    _ => "figures",
                };
                self.out += &format!("<div class=\"{class}\">\n");
                run.iter().for_each(|block| self.block(block));
                self.out += "</div>\n";
            } else {
                run.iter().for_each(|block| self.block(block));
            }
        }
    }

    fn block(&mut self, block: &'a Block) {
        match block {
            Block::Text(text) => self.out += &format!("<p>{}</p>\n", markup::html(text)),
            Block::List(items) => {
                self.out += "<ul>";
                for item in items {
                    self.out += &format!("<li>{}</li>", markup::html(item));
                }
                self.out += "</ul>\n";
            }
            Block::Figure { name, figure, caption } => self.figure(name, figure, caption),
            Block::Table { name, table } => self.table(name, table),
            Block::Facts(facts) => {
                self.out += "<dl>";
                for (name, text) in facts {
                    self.out += &format!("<dt>{}</dt><dd>{}</dd>", escape(name), markup::html(text));
                }
                self.out += "</dl>\n";
            }
            Block::Badge { tone, label, text } => {
                let class = match tone {
                    Tone::Good => "yes",
                    Tone::Open => "open",
                    Tone::Bad => "no",
                };
                let (sign, label) = (tone.sign(), escape(label));
                self.out +=
                    &format!("<p class=\"verdict\"><span class=\"badge {class}\"><span aria-hidden=\"true\">{sign}</span> {label}</span> ");
                self.out += &format!("<span>{}</span></p>\n", markup::html(text));
            }
            Block::Code(text) => {
                let lines: Vec<String> = text.lines().map(escape).collect();
                self.out += &format!("<pre tabindex=\"0\"><code>{}</code></pre>\n", lines.join("\n"));
            }
            Block::Details { summary, blocks } | Block::Fold { summary, blocks } => {
                self.out += &format!("<details><summary>{}</summary>\n", markup::html(summary));
                self.blocks(blocks);
                self.out += "</details>\n";
            }
        }
    }

    fn figure(&mut self, name: &str, figure: &'a Figure, caption: &str) {
        let id = self.id(&format!("figure-{}", slug(name)));
        let file = id.trim_start_matches("figure-").to_string();
        self.out += &format!("<figure id=\"{id}\">{}", figure.to_inline_svg());
        // The script toggles between the two forms of a figure that it cannot redraw.
        if let Some(log) = figure.in_log().filter(|_| FigureData::new(figure).is_still()) {
            self.out += &format!("<div class=\"in-log\" hidden=\"\">{}</div>", log.to_inline_svg());
        }
        let kinds = [("SVG", "svg"), ("PNG", "png"), ("CSV", "csv"), ("Vega-Lite", "vl.json")];
        let kinds = kinds.map(|(name, ending)| (name.to_owned(), format!("figures/{file}.{ending}")));
        let column = [("one column: SVG", "svg"), ("PDF", "pdf")];
        let column = column.map(|(name, ending)| (name.to_owned(), format!("figures/column/{file}.{ending}")));
        let files: Vec<(String, String)> = kinds.into_iter().chain(column).collect();
        self.caption(caption, &files);
        self.out += "</figure>\n";
        self.figures.push((id, figure));
        self.assets.push(Asset::Figure(file, figure));
    }

    fn table(&mut self, name: &str, table: &'a Table) {
        let id = self.id(&format!("table-{}", slug(name)));
        let file = id.trim_start_matches("table-").to_string();
        let label = escape(&markup::plain(&table.caption));
        let label = if label.is_empty() { String::new() } else { format!(" role=\"region\" aria-label=\"{label}\"") };
        self.out += &format!("<figure class=\"table\" id=\"{id}\"><div class=\"scroll\" tabindex=\"0\"{label}>{}</div>", table.to_html());
        self.caption("", &[("CSV".into(), format!("tables/{file}.csv"))]);
        self.out += "</figure>\n";
        self.assets.push(Asset::Table(file, table));
    }

    /// A caption and, if files are written, links to them.
    fn caption(&mut self, text: &str, files: &[(String, String)]) {
        let links: Vec<String> = files.iter().map(|(kind, path)| markup::link(kind, path)).collect();
        let links = if self.files { format!("<span class=\"files\">{}</span>", links.join(" · ")) } else { String::new() };
        if !text.is_empty() || self.files {
            self.out += &format!("<figcaption>{} {links}</figcaption>", markup::html(text));
        }
    }
}

/// Lower-case letters, digits and dashes, for anchors and file names.
fn slug(text: &str) -> String {
    let text = markup::plain(text).to_ascii_lowercase();
    let words: Vec<&str> = text.split(|c: char| !c.is_ascii_alphanumeric()).filter(|word| !word.is_empty()).collect();
    if words.is_empty() { "part".into() } else { words.join("-").chars().take(60).collect() }
}
