//! The tables of function pointers. One macro defines the types of the pointers, the names for the
//! lookup, and the prototypes that `tests/headers.rs` compares with a C compiler.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::mem::transmute;

use libc::{iovec, size_t, ssize_t, time_t, timespec};

use crate::types::*;

/// The name and prototype of a function.
#[derive(Debug, Clone, Copy)]
pub struct Symbol {
    /// The name that the library exports.
    pub name: &'static CStr,
    /// The types of its parameters, as written in this file.
    pub parameters: &'static [&'static str],
    /// The type of its result, as written in this file; empty for none.
    pub result: &'static str,
    /// Whether loading fails without it.
    pub required: bool,
}

macro_rules! table {
    (
        $(#[$doc:meta])* $table:ident
        required { $(fn $name:ident($($type:ty),*) $(-> $result:ty)?;)* }
        optional { $(fn $newer:ident($($newer_type:ty),*) $(-> $newer_result:ty)?;)* }
    ) => {
        $(#[$doc])*
        #[allow(clippy::type_complexity)]
        #[derive(Debug)]
        pub struct $table {
            $(pub $name: unsafe extern "C" fn($($type),*) $(-> $result)?,)*
            $(pub $newer: Option<unsafe extern "C" fn($($newer_type),*) $(-> $newer_result)?>,)*
        }

        impl $table {
            /// Every function of the table.
            pub const SYMBOLS: &'static [Symbol] = &[
                $(symbol!(true, $name, ($($type),*), ($($result)?)),)*
                $(symbol!(false, $newer, ($($newer_type),*), ($($newer_result)?)),)*
            ];

            /// Fills the table. The error is the name of the first required function that is missing.
            ///
            /// # Safety
            /// `find` must return null or the address of the C function of that name as the headers
            /// declare it, valid for the rest of the process.
            pub(crate) unsafe fn fill(
                find: impl Fn(&CStr) -> *mut c_void,
            ) -> Result<Self, &'static CStr> {
                // A function pointer has the size of a data pointer on every system with dlsym, and null
                // becomes `None`.
                Ok(Self {
                    $($name: {
                        let name = c_name(concat!(stringify!($name), "\0"));
                        // SAFETY: by this function's contract `find` returns null or a function of this
                        // type; tests/headers.rs compares the types with the headers.
                        unsafe {
                            transmute::<
                                *mut c_void,
                                Option<unsafe extern "C" fn($($type),*) $(-> $result)?>,
                            >(find(name))
                        }
                        .ok_or(name)?
                    },)*
                    // SAFETY: see above.
                    $($newer: unsafe {
                        transmute::<
                            *mut c_void,
                            Option<unsafe extern "C" fn($($newer_type),*) $(-> $newer_result)?>,
                        >(find(c_name(concat!(stringify!($newer), "\0"))))
                    },)*
                })
            }
        }
    };
}

macro_rules! symbol {
    ($required:literal, $name:ident, ($($type:ty),*), ($($result:ty)?)) => {
        Symbol {
            name: c_name(concat!(stringify!($name), "\0")),
            parameters: &[$(stringify!($type)),*],
            result: concat!($(stringify!($result))?),
            required: $required,
        }
    };
}

const fn c_name(terminated: &'static str) -> &'static CStr {
    match CStr::from_bytes_with_nul(terminated.as_bytes()) {
        Ok(name) => name,
        Err(_) => panic!("a symbol's name ends with its only zero byte"),
    }
}

table! {
    /// The functions of librados. Those that Ceph 15 lacks are optional.
    Librados
    required {
        fn rados_version(*mut c_int, *mut c_int, *mut c_int);
        fn rados_create2(*mut rados_t, *const c_char, *const c_char, u64) -> c_int;
        fn rados_shutdown(rados_t);
        fn rados_conf_read_file(rados_t, *const c_char) -> c_int;
        fn rados_conf_parse_argv(rados_t, c_int, *mut *const c_char) -> c_int;
        fn rados_conf_set(rados_t, *const c_char, *const c_char) -> c_int;
        fn rados_conf_get(rados_t, *const c_char, *mut c_char, size_t) -> c_int;
        fn rados_connect(rados_t) -> c_int;
        fn rados_cluster_fsid(rados_t, *mut c_char, size_t) -> c_int;
        fn rados_getaddrs(rados_t, *mut *mut c_char) -> c_int;
        fn rados_buffer_free(*mut c_char);
        fn rados_mon_command(
            rados_t, *mut *const c_char, size_t, *const c_char, size_t,
            *mut *mut c_char, *mut size_t, *mut *mut c_char, *mut size_t
        ) -> c_int;
        fn rados_wait_for_latest_osdmap(rados_t) -> c_int;
        fn rados_pool_reverse_lookup(rados_t, i64, *mut c_char, size_t) -> c_int;
        fn rados_ioctx_create(rados_t, *const c_char, *mut rados_ioctx_t) -> c_int;
        fn rados_ioctx_destroy(rados_ioctx_t);
        fn rados_ioctx_get_id(rados_ioctx_t) -> i64;
        fn rados_ioctx_set_namespace(rados_ioctx_t, *const c_char);
        fn rados_read(rados_ioctx_t, *const c_char, *mut c_char, size_t, u64) -> c_int;
        fn rados_remove(rados_ioctx_t, *const c_char) -> c_int;
        fn rados_exec(
            rados_ioctx_t, *const c_char, *const c_char, *const c_char, *const c_char, size_t,
            *mut c_char, size_t
        ) -> c_int;
        fn rados_list_lockers(
            rados_ioctx_t, *const c_char, *const c_char, *mut c_int, *mut c_char, *mut size_t,
            *mut c_char, *mut size_t, *mut c_char, *mut size_t, *mut c_char, *mut size_t
        ) -> ssize_t;
        fn rados_break_lock(
            rados_ioctx_t, *const c_char, *const c_char, *const c_char, *const c_char
        ) -> c_int;
        fn rados_getxattr(
            rados_ioctx_t, *const c_char, *const c_char, *mut c_char, size_t
        ) -> c_int;
        fn rados_create_write_op() -> rados_write_op_t;
        fn rados_release_write_op(rados_write_op_t);
        fn rados_write_op_cmpxattr(
            rados_write_op_t, *const c_char, u8, *const c_char, size_t
        );
        fn rados_write_op_omap_cmp(
            rados_write_op_t, *const c_char, u8, *const c_char, size_t, *mut c_int
        );
        fn rados_write_op_exec(
            rados_write_op_t, *const c_char, *const c_char, *const c_char, size_t, *mut c_int
        );
        fn rados_write_op_operate(
            rados_write_op_t, rados_ioctx_t, *const c_char, *mut time_t, c_int
        ) -> c_int;
    }
    optional {
        fn rados_set_pool_full_try(rados_ioctx_t);
    }
}

table! {
    /// The functions of librbd. Those that Ceph 15 lacks are optional.
    Librbd
    required {
        fn rbd_version(*mut c_int, *mut c_int, *mut c_int);
        fn rbd_image_options_create(*mut rbd_image_options_t);
        fn rbd_image_options_destroy(rbd_image_options_t);
        fn rbd_image_options_set_string(rbd_image_options_t, c_int, *const c_char) -> c_int;
        fn rbd_image_options_set_uint64(rbd_image_options_t, c_int, u64) -> c_int;
        fn rbd_list2(rados_ioctx_t, *mut rbd_image_spec_t, *mut size_t) -> c_int;
        fn rbd_image_spec_list_cleanup(*mut rbd_image_spec_t, size_t);
        fn rbd_create4(rados_ioctx_t, *const c_char, u64, rbd_image_options_t) -> c_int;
        fn rbd_clone3(
            rados_ioctx_t, *const c_char, *const c_char,
            rados_ioctx_t, *const c_char, rbd_image_options_t
        ) -> c_int;
        fn rbd_remove_with_progress(
            rados_ioctx_t, *const c_char, librbd_progress_fn_t, *mut c_void
        ) -> c_int;
        fn rbd_namespace_create(rados_ioctx_t, *const c_char) -> c_int;
        fn rbd_namespace_exists(rados_ioctx_t, *const c_char, *mut bool) -> c_int;
        fn rbd_trash_move(rados_ioctx_t, *const c_char, u64) -> c_int;
        fn rbd_trash_list(rados_ioctx_t, *mut rbd_trash_image_info_t, *mut size_t) -> c_int;
        fn rbd_trash_list_cleanup(*mut rbd_trash_image_info_t, size_t);
        fn rbd_trash_remove_with_progress(
            rados_ioctx_t, *const c_char, bool, librbd_progress_fn_t, *mut c_void
        ) -> c_int;
        fn rbd_trash_restore(rados_ioctx_t, *const c_char, *const c_char) -> c_int;
        fn rbd_open(rados_ioctx_t, *const c_char, *mut rbd_image_t, *const c_char) -> c_int;
        fn rbd_open_read_only(
            rados_ioctx_t, *const c_char, *mut rbd_image_t, *const c_char
        ) -> c_int;
        fn rbd_open_by_id(
            rados_ioctx_t, *const c_char, *mut rbd_image_t, *const c_char
        ) -> c_int;
        fn rbd_open_by_id_read_only(
            rados_ioctx_t, *const c_char, *mut rbd_image_t, *const c_char
        ) -> c_int;
        fn rbd_close(rbd_image_t) -> c_int;
        fn rbd_resize2(
            rbd_image_t, u64, bool, librbd_progress_fn_t, *mut c_void
        ) -> c_int;
        fn rbd_stat(rbd_image_t, *mut rbd_image_info_t, size_t) -> c_int;
        fn rbd_get_size(rbd_image_t, *mut u64) -> c_int;
        fn rbd_get_features(rbd_image_t, *mut u64) -> c_int;
        fn rbd_get_flags(rbd_image_t, *mut u64) -> c_int;
        fn rbd_get_stripe_unit(rbd_image_t, *mut u64) -> c_int;
        fn rbd_get_stripe_count(rbd_image_t, *mut u64) -> c_int;
        fn rbd_get_id(rbd_image_t, *mut c_char, size_t) -> c_int;
        fn rbd_get_data_pool_id(rbd_image_t) -> i64;
        fn rbd_get_create_timestamp(rbd_image_t, *mut timespec) -> c_int;
        fn rbd_get_overlap(rbd_image_t, *mut u64) -> c_int;
        fn rbd_get_parent(
            rbd_image_t, *mut rbd_linked_image_spec_t, *mut rbd_snap_spec_t
        ) -> c_int;
        fn rbd_linked_image_spec_cleanup(*mut rbd_linked_image_spec_t);
        fn rbd_snap_spec_cleanup(*mut rbd_snap_spec_t);
        fn rbd_list_children3(rbd_image_t, *mut rbd_linked_image_spec_t, *mut size_t) -> c_int;
        fn rbd_linked_image_spec_list_cleanup(*mut rbd_linked_image_spec_t, size_t);
        fn rbd_config_image_list(rbd_image_t, *mut rbd_config_option_t, *mut c_int) -> c_int;
        fn rbd_config_image_list_cleanup(*mut rbd_config_option_t, c_int);
        fn rbd_snap_list(rbd_image_t, *mut rbd_snap_info_t, *mut c_int) -> c_int;
        fn rbd_snap_list_end(*mut rbd_snap_info_t);
        fn rbd_snap_create(rbd_image_t, *const c_char) -> c_int;
        fn rbd_snap_remove(rbd_image_t, *const c_char) -> c_int;
        fn rbd_snap_rename(rbd_image_t, *const c_char, *const c_char) -> c_int;
        fn rbd_snap_rollback_with_progress(
            rbd_image_t, *const c_char, librbd_progress_fn_t, *mut c_void
        ) -> c_int;
        fn rbd_snap_protect(rbd_image_t, *const c_char) -> c_int;
        fn rbd_snap_unprotect(rbd_image_t, *const c_char) -> c_int;
        fn rbd_snap_is_protected(rbd_image_t, *const c_char, *mut c_int) -> c_int;
        fn rbd_snap_get_timestamp(rbd_image_t, u64, *mut timespec) -> c_int;
        fn rbd_snap_get_namespace_type(
            rbd_image_t, u64, *mut rbd_snap_namespace_type_t
        ) -> c_int;
        fn rbd_snap_get_trash_namespace(rbd_image_t, u64, *mut c_char, size_t) -> c_int;
        fn rbd_flatten_with_progress(rbd_image_t, librbd_progress_fn_t, *mut c_void) -> c_int;
        fn rbd_sparsify_with_progress(
            rbd_image_t, size_t, librbd_progress_fn_t, *mut c_void
        ) -> c_int;
        fn rbd_metadata_get(rbd_image_t, *const c_char, *mut c_char, *mut size_t) -> c_int;
        fn rbd_metadata_set(rbd_image_t, *const c_char, *const c_char) -> c_int;
        fn rbd_metadata_remove(rbd_image_t, *const c_char) -> c_int;
        fn rbd_metadata_list(
            rbd_image_t, *const c_char, u64, *mut c_char, *mut size_t, *mut c_char, *mut size_t
        ) -> c_int;
        fn rbd_is_exclusive_lock_owner(rbd_image_t, *mut c_int) -> c_int;
        fn rbd_lock_acquire(rbd_image_t, rbd_lock_mode_t) -> c_int;
        fn rbd_lock_release(rbd_image_t) -> c_int;
        fn rbd_lock_get_owners(
            rbd_image_t, *mut rbd_lock_mode_t, *mut *mut c_char, *mut size_t
        ) -> c_int;
        fn rbd_lock_get_owners_cleanup(*mut *mut c_char, size_t);
        fn rbd_watchers_list(rbd_image_t, *mut rbd_image_watcher_t, *mut size_t) -> c_int;
        fn rbd_watchers_list_cleanup(*mut rbd_image_watcher_t, size_t);
        fn rbd_update_watch(rbd_image_t, *mut u64, rbd_update_callback_t, *mut c_void) -> c_int;
        fn rbd_update_unwatch(rbd_image_t, u64) -> c_int;
        fn rbd_diff_iterate2(
            rbd_image_t, *const c_char, u64, u64, u8, u8, rbd_diff_fn_t, *mut c_void
        ) -> c_int;
        fn rbd_aio_create_completion(
            *mut c_void, rbd_callback_t, *mut rbd_completion_t
        ) -> c_int;
        fn rbd_aio_get_return_value(rbd_completion_t) -> ssize_t;
        fn rbd_aio_release(rbd_completion_t);
        fn rbd_aio_readv(rbd_image_t, *const iovec, c_int, u64, rbd_completion_t) -> c_int;
        fn rbd_aio_writev(rbd_image_t, *const iovec, c_int, u64, rbd_completion_t) -> c_int;
        fn rbd_aio_discard(rbd_image_t, u64, u64, rbd_completion_t) -> c_int;
        fn rbd_aio_flush(rbd_image_t, rbd_completion_t) -> c_int;
    }
    optional {
        fn rbd_aio_write_zeroes(
            rbd_image_t, u64, size_t, rbd_completion_t, c_int, c_int
        ) -> c_int;
        fn rbd_mirror_image_get_info(
            rbd_image_t, *mut rbd_mirror_image_info_t, size_t
        ) -> c_int;
        fn rbd_mirror_image_get_info_cleanup(*mut rbd_mirror_image_info_t);
        fn rbd_encryption_format(
            rbd_image_t, rbd_encryption_format_t, rbd_encryption_options_t, size_t
        ) -> c_int;
        fn rbd_encryption_load(
            rbd_image_t, rbd_encryption_format_t, rbd_encryption_options_t, size_t
        ) -> c_int;
        fn rbd_encryption_load2(rbd_image_t, *const rbd_encryption_spec_t, size_t) -> c_int;
        fn rbd_quiesce_watch(
            rbd_image_t, rbd_update_callback_t, rbd_update_callback_t, *mut c_void, *mut u64
        ) -> c_int;
        fn rbd_quiesce_complete(rbd_image_t, u64, c_int);
        fn rbd_quiesce_unwatch(rbd_image_t, u64) -> c_int;
    }
}
