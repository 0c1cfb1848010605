//! How long the parts of fail-overs take.

use std::collections::BTreeMap;
use std::time::Instant;

/// The seconds of the parts of one fail-over, in their order.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Parts(Vec<(&'static str, f64)>);

impl Parts {
    /// Makes the parts from the times at which they ended. The first one began at `begin`. A part that ended before the one
    /// that precedes it took no time.
    pub(crate) fn new(begin: Instant, ends: &[(&'static str, Instant)]) -> Self {
        let mut before = begin;
        let seconds = |&(part, at): &(&'static str, Instant)| {
            let seconds = at.saturating_duration_since(before).as_secs_f64();
            before = before.max(at);
            (part, seconds)
        };
        Self(ends.iter().map(seconds).collect())
    }

    pub(crate) fn total(&self) -> f64 {
        self.0.iter().map(|(_, seconds)| seconds).sum()
    }

    pub(crate) fn print(&self, what: &str) {
        let parts: Vec<String> =
            self.0.iter().map(|(part, seconds)| format!("{part} {seconds:.1}")).collect();
        println!("figures: {what}: {:.1} s: {}", self.total(), parts.join(", "));
    }
}

/// The fail-overs of one kind, by where the leader of the controllers was.
#[derive(Default)]
pub(crate) struct Figures(BTreeMap<&'static str, Vec<Parts>>);

impl Figures {
    pub(crate) fn add(&mut self, leader: &'static str, parts: Parts) {
        self.0.entry(leader).or_default().push(parts);
    }

    /// Prints the median and the worst of all rounds and of each part.
    pub(crate) fn print(&self, kind: &str) {
        for line in self.lines() {
            println!("figures: {kind}, {line}");
        }
    }

    fn lines(&self) -> Vec<String> {
        let line = |(leader, rounds): (&&str, &Vec<Parts>)| {
            let of = |part: usize| median_and_worst(rounds.iter().map(|round| round.0[part].1));
            let parts = rounds[0].0.iter().enumerate();
            let parts: Vec<String> =
                parts.map(|(number, (part, _))| format!("{part} {}", of(number))).collect();
            let total = median_and_worst(rounds.iter().map(Parts::total));
            let count = rounds.len();
            format!(
                "leader on {leader}: {count} rounds, seconds as median/worst: all {total}, {}",
                parts.join(", ")
            )
        };
        self.0.iter().map(line).collect()
    }
}

/// Returns the text `MEDIAN/WORST`. Of an even number of values, the upper one of the two in the middle is the median.
fn median_and_worst(values: impl Iterator<Item = f64>) -> String {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    format!("{:.1}/{:.1}", values[values.len() / 2], values[values.len() - 1])
}

#[test]
fn each_part_has_its_median_and_its_worst_round_where_the_leader_was() {
    let mut figures = Figures::default();
    let begin = Instant::now();
    for (leader, ends) in [("A", [1, 9]), ("A", [5, 6]), ("B", [3, 2]), ("A", [2, 4])] {
        let at = |seconds| begin + std::time::Duration::from_secs(seconds);
        figures.add(leader, Parts::new(begin, &[("x", at(ends[0])), ("y", at(ends[1]))]));
    }
    let lines = [
        "leader on A: 3 rounds, seconds as median/worst: all 6.0/9.0, x 2.0/5.0, y 2.0/8.0",
        "leader on B: 1 rounds, seconds as median/worst: all 3.0/3.0, x 3.0/3.0, y 0.0/0.0",
    ];
    assert_eq!(figures.lines(), lines);
}
