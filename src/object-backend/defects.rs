//! Lists of defects for people: adjacent ranges with the same cause are one defect.

use cleat_backend::store::{Checked, DamagedRange, Defect};

/// Adds a defect, or extends the last one, which has the same cause.
pub(crate) fn add(found: &mut Checked, defect: Defect) {
    if let Some(last) = found.defects.last_mut()
        && (&last.problem, &last.snapshot) == (&defect.problem, &defect.snapshot)
        && extend(&mut last.range, defect.range)
    {
        return;
    }
    if found.defects.len() < Checked::MAX_DEFECTS {
        found.defects.push(defect);
    }
}

/// Extends a range by the next one, if they are adjacent.
pub(crate) fn extend(known: &mut Option<DamagedRange>, next: Option<DamagedRange>) -> bool {
    match (known, next) {
        (Some(known), Some(next)) if known.offset + known.length == next.offset => {
            known.length += next.length;
            true
        }
        _ => false,
    }
}
