//! The version, build and features of this binary.

use std::sync::LazyLock;

use crate::features::{self, Feature};

/// Returns the output of `--version`, after the program's name.
pub(super) fn long() -> &'static str {
    static LONG: LazyLock<String> = LazyLock::new(|| {
        let (present, absent): (Vec<Feature>, _) =
            features::ALL.into_iter().partition(|feature| feature.is_present);
        let build = cleat_worker::version::LONG;
        format!("{build}\nfeatures: {}\nleft out: {}", names(&present), names(&absent))
    });
    &LONG
}

fn names(features: &[Feature]) -> String {
    if features.is_empty() {
        return "none".to_owned();
    }
    features.iter().map(|feature| feature.name).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_feature_is_named_once() {
        let lines = long().lines().skip_while(|line| !line.starts_with("features: "));
        let text = lines.collect::<Vec<_>>().join(" ");
        for feature in features::ALL {
            let named = text.split([' ', ',']).filter(|word| *word == feature.name).count();
            assert_eq!(named, 1, "{}: {text}", feature.name);
        }
        assert_eq!(names(&[]), "none");
    }
}
