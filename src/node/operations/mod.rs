//! The operations that users request, one file each.

pub(crate) mod adopt;
pub(crate) mod force_unmap;
pub(crate) mod handover;
pub(crate) mod map;
pub(crate) mod orphans;
pub(crate) mod recover;
pub(crate) mod resize;
pub(crate) mod set_options;
pub(crate) mod unmap;
pub(crate) mod upgrade;
