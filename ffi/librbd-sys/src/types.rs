//! The types and constants of the headers. `tests/headers.rs` checks their layouts and values against
//! installed headers.
#![allow(non_camel_case_types)]

use std::ffi::{c_char, c_int, c_void};

/// A cluster handle.
pub type rados_t = *mut c_void;
/// A pool handle.
pub type rados_ioctx_t = *mut c_void;
/// Operations on one object that are executed together or not at all.
pub type rados_write_op_t = *mut c_void;
/// An open image.
pub type rbd_image_t = *mut c_void;
/// Options for a new image.
pub type rbd_image_options_t = *mut c_void;
/// The completion of an asynchronous operation.
pub type rbd_completion_t = *mut c_void;
/// The mode of a lock: shared or exclusive (see [`RBD_LOCK_MODE_EXCLUSIVE`]).
pub type rbd_lock_mode_t = c_int;

/// The origin of a snapshot (see [`RBD_SNAP_NAMESPACE_TYPE_USER`]).
pub type rbd_snap_namespace_type_t = c_int;

/// The format of encryption (see [`RBD_ENCRYPTION_FORMAT_LUKS2`]).
pub type rbd_encryption_format_t = c_int;
/// A pointer to one of the structures with options below, depending on the format.
pub type rbd_encryption_options_t = *mut c_void;

/// A callback for the end of an operation, on a thread of the library. Must not unwind.
pub type rbd_callback_t = unsafe extern "C" fn(rbd_completion_t, *mut c_void);
/// A callback with the number of finished parts and of all parts. A negative result ends some operations.
pub type librbd_progress_fn_t = unsafe extern "C" fn(u64, u64, *mut c_void) -> c_int;
/// A callback for a change of an image's header, on a thread of the library.
pub type rbd_update_callback_t = unsafe extern "C" fn(*mut c_void);
/// A callback with the offset and length of an extent, and whether it exists. A negative result ends the
/// walk.
pub type rbd_diff_fn_t = unsafe extern "C" fn(u64, usize, c_int, *mut c_void) -> c_int;

/// The result of `rbd_stat`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct rbd_image_info_t {
    pub size: u64,
    pub obj_size: u64,
    pub num_objs: u64,
    pub order: c_int,
    pub block_name_prefix: [c_char; RBD_MAX_BLOCK_NAME_SIZE],
    pub parent_pool: i64,
    pub parent_name: [c_char; RBD_MAX_IMAGE_NAME_SIZE],
}

/// An entry of `rbd_list2`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct rbd_image_spec_t {
    pub id: *mut c_char,
    pub name: *mut c_char,
}

/// A parent or a child of an image, with its location.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct rbd_linked_image_spec_t {
    pub pool_id: i64,
    pub pool_name: *mut c_char,
    pub pool_namespace: *mut c_char,
    pub image_id: *mut c_char,
    pub image_name: *mut c_char,
    pub trash: bool,
}

/// The snapshot that a clone was made from.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct rbd_snap_spec_t {
    pub id: u64,
    pub namespace_type: rbd_snap_namespace_type_t,
    pub name: *mut c_char,
}

/// An entry of `rbd_snap_list`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct rbd_snap_info_t {
    pub id: u64,
    pub size: u64,
    pub name: *const c_char,
}

/// An entry of `rbd_watchers_list`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct rbd_image_watcher_t {
    pub addr: *mut c_char,
    pub id: i64,
    pub cookie: u64,
}

/// An entry of `rbd_config_image_list`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct rbd_config_option_t {
    pub name: *mut c_char,
    pub value: *mut c_char,
    pub source: c_int,
}

/// An entry of `rbd_trash_list`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct rbd_trash_image_info_t {
    pub id: *mut c_char,
    pub name: *mut c_char,
    pub source: c_int,
    pub deletion_time: libc::time_t,
    pub deferment_end_time: libc::time_t,
}

/// The mirroring state of an image.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct rbd_mirror_image_info_t {
    pub global_id: *mut c_char,
    pub state: c_int,
    pub primary: bool,
}

/// The options for LUKS 1.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct rbd_encryption_luks1_format_options_t {
    pub alg: c_int,
    pub passphrase: *const c_char,
    pub passphrase_size: usize,
}
/// The options for LUKS 2, with the same layout.
pub type rbd_encryption_luks2_format_options_t = rbd_encryption_luks1_format_options_t;

/// The options for LUKS of either version.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct rbd_encryption_luks_format_options_t {
    pub passphrase: *const c_char,
    pub passphrase_size: usize,
}

/// The format and options for one image of a chain of clones.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct rbd_encryption_spec_t {
    pub format: rbd_encryption_format_t,
    pub opts: rbd_encryption_options_t,
    pub opts_size: usize,
}

pub const RBD_ENCRYPTION_FORMAT_LUKS1: rbd_encryption_format_t = 0;
pub const RBD_ENCRYPTION_FORMAT_LUKS2: rbd_encryption_format_t = 1;
/// LUKS of either version, for libraries with `rbd_encryption_load2`.
pub const RBD_ENCRYPTION_FORMAT_LUKS: rbd_encryption_format_t = 2;
pub const RBD_ENCRYPTION_ALGORITHM_AES256: c_int = 1;

pub const RBD_MAX_IMAGE_NAME_SIZE: usize = 96;
pub const RBD_MAX_BLOCK_NAME_SIZE: usize = 24;

pub const RBD_FEATURE_LAYERING: u64 = 1 << 0;
pub const RBD_FEATURE_STRIPINGV2: u64 = 1 << 1;
pub const RBD_FEATURE_EXCLUSIVE_LOCK: u64 = 1 << 2;
pub const RBD_FEATURE_OBJECT_MAP: u64 = 1 << 3;
pub const RBD_FEATURE_FAST_DIFF: u64 = 1 << 4;
pub const RBD_FEATURE_DEEP_FLATTEN: u64 = 1 << 5;
pub const RBD_FEATURE_JOURNALING: u64 = 1 << 6;
pub const RBD_FEATURE_DATA_POOL: u64 = 1 << 7;
pub const RBD_FEATURE_NON_PRIMARY: u64 = 1 << 10;

pub const RBD_FLAG_OBJECT_MAP_INVALID: u64 = 1 << 0;
pub const RBD_FLAG_FAST_DIFF_INVALID: u64 = 1 << 1;

pub const RBD_IMAGE_OPTION_FEATURES: c_int = 1;
pub const RBD_IMAGE_OPTION_ORDER: c_int = 2;
pub const RBD_IMAGE_OPTION_STRIPE_UNIT: c_int = 3;
pub const RBD_IMAGE_OPTION_STRIPE_COUNT: c_int = 4;
pub const RBD_IMAGE_OPTION_DATA_POOL: c_int = 10;
pub const RBD_IMAGE_OPTION_CLONE_FORMAT: c_int = 12;

pub const RBD_SNAP_NAMESPACE_TYPE_USER: rbd_snap_namespace_type_t = 0;
pub const RBD_SNAP_NAMESPACE_TYPE_TRASH: rbd_snap_namespace_type_t = 2;
pub const RBD_SNAP_NAMESPACE_TYPE_MIRROR: rbd_snap_namespace_type_t = 3;

pub const RBD_MIRROR_IMAGE_ENABLED: c_int = 1;

pub const RBD_LOCK_MODE_EXCLUSIVE: rbd_lock_mode_t = 0;

pub const LIBRADOS_CMPXATTR_OP_EQ: u8 = 1;

pub const RBD_WRITE_ZEROES_FLAG_THICK_PROVISION: c_int = 1;
