//! The rates of all rows as bars, in SVG.

use std::fmt::Write as _;

use super::report::{BARE, CLEAT, FIO, Result};

const WIDTH: usize = 980;
/// The place of the first bar, after the names.
const LEFT: usize = 180;
/// The length of the longest bar.
const LENGTH: f64 = 560.0;
const BAR: usize = 16;
const TITLE: usize = 26;

/// Draws a group of bars for each row. The longest bar of a row is its highest rate.
pub fn svg(results: &[Result]) -> String {
    let height: usize =
        results.iter().map(|result| TITLE + BAR * result.figures.len() + 10).sum::<usize>() + 10;
    let mut text = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{WIDTH}\" height=\"{height}\" \
         font-family=\"sans-serif\" font-size=\"12\">\n\
         <rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n"
    );
    let mut y = 0;
    for result in results {
        y += TITLE;
        let title = result.name;
        writeln!(text, "<text x=\"8\" y=\"{}\" font-weight=\"bold\">{title}</text>", y - 6)
            .unwrap();
        let highest = result.figures.iter().map(|figures| figures.rate).fold(1.0, f64::max);
        for figures in &result.figures {
            let (name, rate, baseline) = (&figures.name, figures.rate, y + BAR - 4);
            let (length, height) = (rate / highest * LENGTH, BAR - 3);
            let end = LEFT as f64 + length + 6.0;
            let latency = figures.latency_us.map_or_else(String::new, |[p50, p99, _]| {
                format!(", p50 {p50:.0} µs, p99 {p99:.0} µs")
            });
            writeln!(
                text,
                "<text x=\"{}\" y=\"{baseline}\" text-anchor=\"end\">{name}</text>\
                 <rect x=\"{LEFT}\" y=\"{y}\" width=\"{length:.0}\" height=\"{height}\" fill=\"{}\"/>\
                 <text x=\"{end:.0}\" y=\"{baseline}\">{:.1}k/s{latency}</text>",
                LEFT - 8,
                colour(name),
                rate / 1e3
            )
            .unwrap();
            y += BAR;
        }
        y += 10;
    }
    text + "</svg>\n"
}

fn colour(name: &str) -> &'static str {
    match name {
        CLEAT => "#1f77b4",
        BARE | FIO => "#bbbbbb",
        _ if name.starts_with(CLEAT) => "#9ecae1",
        _ => "#ff9f4a",
    }
}
