//! The layout of images: features by name, sizes of objects, stripes.

use librbd::{
    Image, NewImage, RBD_FEATURE_DATA_POOL, RBD_FEATURE_DEEP_FLATTEN, RBD_FEATURE_EXCLUSIVE_LOCK,
    RBD_FEATURE_FAST_DIFF, RBD_FEATURE_JOURNALING, RBD_FEATURE_LAYERING, RBD_FEATURE_OBJECT_MAP,
};

use cleat_backend::store::Layout;
use cleat_backend::uri::{Size, invalid};
use cleat_core::error::{Error, ErrorKind, Result};

/// The features that a user may select, each with the features that it needs.
const CHOOSABLE: [(&str, u64); 6] = [
    ("layering", RBD_FEATURE_LAYERING),
    ("exclusive-lock", RBD_FEATURE_EXCLUSIVE_LOCK),
    ("object-map", RBD_FEATURE_OBJECT_MAP | RBD_FEATURE_EXCLUSIVE_LOCK),
    ("fast-diff", RBD_FEATURE_FAST_DIFF | RBD_FEATURE_OBJECT_MAP | RBD_FEATURE_EXCLUSIVE_LOCK),
    ("deep-flatten", RBD_FEATURE_DEEP_FLATTEN),
    ("journaling", RBD_FEATURE_JOURNALING | RBD_FEATURE_EXCLUSIVE_LOCK),
];

/// The names of the features, by their bit (`rbd/features.h`).
const NAMES: [&str; 12] = [
    "layering",
    "striping",
    "exclusive-lock",
    "object-map",
    "fast-diff",
    "deep-flatten",
    "journaling",
    "data-pool",
    "operations",
    "migrating",
    "non-primary",
    "dirty-cache",
];

/// The sizes of objects that librbd accepts.
const OBJECT_SIZES: std::ops::RangeInclusive<u64> = 4096..=32 << 20;

/// Converts `layout` for librbd.
///
/// # Errors
/// Returns `InvalidArgument` for values that librbd would reject without a reason.
pub(crate) fn new_image(layout: &Layout) -> Result<NewImage> {
    if let Some(size) = layout.object_size
        && !(size.is_power_of_two() && OBJECT_SIZES.contains(&size))
    {
        let size = Size(size);
        return Err(invalid(format!("the object size cannot be {size} bytes"))
            .with_repair("give a power of two from 4K to 32M"));
    }
    if layout.compression.is_some() {
        let message = "an RBD image has no compression of its own";
        return Err(Error::new(ErrorKind::Unsupported, message).with_repair(
            "remove the option; a pool compresses: ceph osd pool set POOL compression_mode aggressive",
        ));
    }
    if let Some((unit, count)) = layout.stripes {
        // The unit must divide the object size, which is a power of two.
        let fits = unit.is_power_of_two() && layout.object_size.is_none_or(|size| size >= unit);
        if !fits || count == 0 {
            let unit = Size(unit);
            let message =
                format!("stripes with a unit of {unit} and a count of {count} are invalid");
            return Err(invalid(message).with_repair(
                "the unit must be a power of two up to the object size, and the count above 0",
            ));
        }
    }
    Ok(NewImage {
        features: layout.features.as_deref().map(bits).transpose()?,
        order: layout
            .object_size
            .map(|size| u8::try_from(size.trailing_zeros()).unwrap_or(u8::MAX)),
        stripes: layout.stripes,
        data_pool: layout.data_pool.clone(),
        clone_format: layout.clone_format,
    })
}

/// Returns the names of the features.
pub(crate) fn names(features: u64) -> Vec<String> {
    let known = NAMES.iter().enumerate().filter(|(bit, _)| features & (1 << bit) != 0);
    known.map(|(_, name)| (*name).to_owned()).collect()
}

/// Returns how `image` differs from `layout`. Properties that the layout does not specify are not compared.
pub(crate) fn differences(layout: &Layout, image: &Image) -> Result<Vec<String>, librbd::Error> {
    let mut differences = Vec::new();
    let mut compare = |what: &str, is: String, wanted: String| {
        if is != wanted {
            differences.push(format!("{what} {is}, not {wanted}"));
        }
    };
    let features = image.features()?;
    if let Some(wanted) = layout.features.as_deref().and_then(|wanted| bits(wanted).ok()) {
        let choosable = CHOOSABLE.iter().fold(0, |all, (_, bits)| all | bits);
        let shown = |bits: u64| match names(bits) {
            names if names.is_empty() => "none".to_owned(),
            names => names.join(", "),
        };
        compare("the features", shown(features & choosable), shown(wanted));
    }
    let stat = image.stat()?;
    if let Some(size) = layout.object_size {
        compare("objects of", Size(stat.object_size).to_string(), Size(size).to_string());
    }
    if let Some((unit, count)) = layout.stripes {
        let shown = |unit, count| format!("{} over {count} objects", Size(unit));
        compare("stripes of", shown(stat.stripe_unit, stat.stripe_count), shown(unit, count));
    }
    if let Some(wanted) = &layout.data_pool {
        let has_one = features & RBD_FEATURE_DATA_POOL != 0;
        let is = if has_one { image.data_pool()? } else { "none".to_owned() };
        compare("the data pool", is, wanted.clone());
    }
    Ok(differences)
}

fn bits(wanted: &[String]) -> Result<u64> {
    wanted.iter().try_fold(0, |all, name| {
        let known = CHOOSABLE.iter().find(|(known, _)| known == name);
        known.map(|(_, bits)| all | bits).ok_or_else(|| {
            let choices: Vec<&str> = CHOOSABLE.iter().map(|(name, _)| *name).collect();
            let error = invalid(format!("{name:?} is not a feature that can be selected"));
            match &**name {
                "striping" => error.with_repair("use --stripe-unit and --stripe-count"),
                "data-pool" => error.with_repair("use --data-pool"),
                _ => error.with_repair(format!("the features are {}", choices.join(", "))),
            }
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn features_include_the_features_that_they_need() {
        let wanted = ["fast-diff", "layering"].map(str::to_owned);
        let bits = bits(&wanted).expect("they exist");
        assert_eq!(names(bits), ["layering", "exclusive-lock", "object-map", "fast-diff"]);
        assert_eq!(names(1 << 11 | 1 << 40), ["dirty-cache"]);
    }

    #[test]
    fn invalid_layouts_are_rejected_with_a_reason() {
        let refused = |layout: Layout| {
            let error = new_image(&layout).expect_err("the layout is invalid");
            format!("{}: {}", error.message(), error.repair().unwrap_or(""))
        };
        let none = Layout::default();
        for (layout, cause) in [
            (Layout { object_size: Some(5000), ..none.clone() }, "power of two"),
            (Layout { object_size: Some(64 << 20), ..none.clone() }, "64M"),
            (Layout { stripes: Some((3000, 2)), ..none.clone() }, "up to the object size"),
            (Layout { stripes: Some((4096, 0)), ..none.clone() }, "above 0"),
            (Layout { features: Some(vec!["fast".into()]), ..none.clone() }, "fast-diff"),
            (Layout { features: Some(vec!["striping".into()]), ..none.clone() }, "--stripe-unit"),
        ] {
            assert!(refused(layout).contains(cause), "{cause}");
        }
        let new =
            new_image(&Layout { object_size: Some(1 << 20), ..none }).expect("the layout is valid");
        assert_eq!(new.order, Some(20));
    }
}
