//! Compares the declarations with Ceph's headers by a C compiler, and checks the errors for libraries that
//! are missing or too old.
#![allow(unsafe_code, clippy::unwrap_used)]

use std::ffi::CStr;
use std::fmt::Write as _;
use std::mem::{offset_of, size_of};
use std::path::Path;
use std::process::Command;

use librbd_sys::*;

/// Compares the prototypes of all functions, the layouts of all structures and the values of all constants.
#[test]
fn declarations_agree_with_the_headers() {
    let mut source = String::from(
        "#define _FILE_OFFSET_BITS 64\n#include <stddef.h>\n#include <stdbool.h>\n\
         #include <rados/librados.h>\n#include <rbd/librbd.h>\n",
    );
    let newer = |symbol: &&Symbol| symbol.name == c"rbd_encryption_load2";
    for symbol in Librados::SYMBOLS.iter().chain(Librbd::SYMBOLS).filter(|symbol| !newer(symbol)) {
        prototype(&mut source, symbol);
    }
    layouts(&mut source);
    constants(&mut source);
    // Newer headers announce this feature by a macro.
    source.push_str("#ifdef LIBRBD_SUPPORTS_ENCRYPTION_LOAD2\n");
    Librbd::SYMBOLS.iter().filter(newer).for_each(|symbol| prototype(&mut source, symbol));
    newer_layouts(&mut source);
    source.push_str("#endif\n");
    compile(&source).unwrap_or_else(|complaint| {
        panic!("the headers differ (needs: apt install gcc librbd-dev):\n{complaint}")
    });
}

/// The comparison detects errors.
#[test]
fn a_wrong_declaration_is_detected() {
    let start = "#include <stddef.h>\n#include <stdbool.h>\n#include <rbd/librbd.h>\n";
    let wrong = [
        "_Static_assert(sizeof(rbd_image_spec_t) == 1, \"size\");",
        "_Static_assert(__builtin_types_compatible_p(__typeof__(&rbd_close), void (*)(int)), \"\");",
    ];
    for line in wrong {
        assert!(compile(&format!("{start}{line}\n")).is_err(), "{line}");
    }
}

#[test]
fn the_installed_libraries_have_all_functions() {
    let api = api().unwrap();
    let (mut major, mut minor, mut extra) = (0, 0, 0);
    // SAFETY: the function fills three integers.
    unsafe { (api.rbd.rbd_version)(&raw mut major, &raw mut minor, &raw mut extra) };
    assert_eq!(major, 1);
    assert!(minor >= 12);
    assert!(api.rbd.rbd_aio_write_zeroes.is_some() || minor < 15);
}

#[test]
fn a_missing_library_names_its_package() {
    let error = load(c"libno-such-thing.so.2", c"librbd.so.1").unwrap_err();
    assert!(error.to_string().contains("librados.so.2"), "{error}");
    assert!(error.to_string().contains("libno-such-thing"), "{error}");
    assert!(error.repair().contains("apt install librbd1"), "{}", error.repair());
    assert!(error.is_absent());
}

#[test]
fn the_error_for_an_old_library_names_the_missing_function() {
    // Any other library has none of the functions.
    let error = load(c"libc.so.6", c"libc.so.6").unwrap_err();
    assert!(error.to_string().contains("rados_version"), "{error}");
    assert!(error.repair().contains("Ceph 15"), "{}", error.repair());
    let error = load(c"librados.so.2", c"libc.so.6").unwrap_err();
    assert!(error.to_string().contains("librbd.so.1 lacks the function rbd_version"), "{error}");
    assert!(error.repair().contains("update librbd1"), "{}", error.repair());
}

fn prototype(source: &mut String, symbol: &Symbol) {
    let name = symbol.name.to_str().unwrap();
    let parameters: Vec<_> = symbol.parameters.iter().map(|rust| in_c(rust)).collect();
    let parameters = if parameters.is_empty() { "void".to_owned() } else { parameters.join(", ") };
    let result = if symbol.result.is_empty() { "void".to_owned() } else { in_c(symbol.result) };
    writeln!(
        source,
        "_Static_assert(__builtin_types_compatible_p(__typeof__(&{name}), \
         {result} (*)({parameters})), \"{name}\");"
    )
    .unwrap();
}

/// Converts a type of the tables to C.
fn in_c(rust: &str) -> String {
    let rust = rust.trim();
    if let Some(target) = rust.strip_prefix("*mut ") {
        return format!("{}*", in_c(target));
    }
    if let Some(target) = rust.strip_prefix("*const ") {
        return format!("const {}*", in_c(target));
    }
    match rust {
        "c_char" => "char",
        "c_int" => "int",
        "c_void" => "void",
        "u8" => "uint8_t",
        "u64" => "uint64_t",
        "i64" => "int64_t",
        "timespec" => "struct timespec",
        "iovec" => "struct iovec",
        // The header has no name for this type.
        "rbd_diff_fn_t" => "__typeof__(int (*)(uint64_t, size_t, int, void *))",
        "bool" | "size_t" | "ssize_t" => rust,
        other if other.ends_with("_t") => other,
        other => panic!("the type {other} has no counterpart in C here"),
    }
    .to_owned()
}

macro_rules! layout {
    ($source:ident $($type:ident { $($field:ident),* })*) => { $(
        writeln!($source, "_Static_assert(sizeof({0}) == {1}, \"{0}\");",
            stringify!($type), size_of::<$type>()).unwrap();
        $(writeln!($source, "_Static_assert(offsetof({0}, {1}) == {2}, \"{0}.{1}\");",
            stringify!($type), stringify!($field), offset_of!($type, $field)).unwrap();)*
    )* };
}

macro_rules! constant {
    ($source:ident $($name:ident)*) => { $(
        writeln!($source, "_Static_assert({0} == {1}, \"{0}\");", stringify!($name), $name)
            .unwrap();
    )* };
}

fn newer_layouts(source: &mut String) {
    layout! { source
        rbd_encryption_luks_format_options_t { passphrase, passphrase_size }
        rbd_encryption_spec_t { format, opts, opts_size }
    }
    constant! { source RBD_ENCRYPTION_FORMAT_LUKS }
}

fn layouts(source: &mut String) {
    layout! { source
        rbd_image_info_t {
            size, obj_size, num_objs, order, block_name_prefix, parent_pool, parent_name
        }
        rbd_image_spec_t { id, name }
        rbd_snap_info_t { id, size, name }
        rbd_linked_image_spec_t {
            pool_id, pool_name, pool_namespace, image_id, image_name, trash
        }
        rbd_snap_spec_t { id, namespace_type, name }
        rbd_snap_namespace_type_t {}
        rbd_image_watcher_t { addr, id, cookie }
        rbd_config_option_t { name, value, source }
        rbd_trash_image_info_t { id, name, source, deletion_time, deferment_end_time }
        rbd_mirror_image_info_t { global_id, state, primary }
        rbd_lock_mode_t {}
        rbd_encryption_format_t {}
        rbd_encryption_luks1_format_options_t { alg, passphrase, passphrase_size }
        rbd_encryption_luks2_format_options_t { alg, passphrase, passphrase_size }
    }
}

fn constants(source: &mut String) {
    constant! { source
        RBD_MAX_IMAGE_NAME_SIZE RBD_MAX_BLOCK_NAME_SIZE RBD_FEATURE_LAYERING
        RBD_FEATURE_STRIPINGV2 RBD_FEATURE_EXCLUSIVE_LOCK RBD_FEATURE_OBJECT_MAP
        RBD_FEATURE_FAST_DIFF RBD_FEATURE_DEEP_FLATTEN RBD_FEATURE_JOURNALING
        RBD_FEATURE_DATA_POOL RBD_FEATURE_NON_PRIMARY
        RBD_FLAG_OBJECT_MAP_INVALID RBD_FLAG_FAST_DIFF_INVALID
        RBD_IMAGE_OPTION_FEATURES RBD_IMAGE_OPTION_ORDER RBD_IMAGE_OPTION_STRIPE_UNIT
        RBD_IMAGE_OPTION_STRIPE_COUNT RBD_IMAGE_OPTION_DATA_POOL
        RBD_IMAGE_OPTION_CLONE_FORMAT RBD_SNAP_NAMESPACE_TYPE_USER
        RBD_SNAP_NAMESPACE_TYPE_TRASH RBD_SNAP_NAMESPACE_TYPE_MIRROR
        RBD_MIRROR_IMAGE_ENABLED RBD_LOCK_MODE_EXCLUSIVE LIBRADOS_CMPXATTR_OP_EQ
        RBD_WRITE_ZEROES_FLAG_THICK_PROVISION RBD_ENCRYPTION_FORMAT_LUKS1
        RBD_ENCRYPTION_FORMAT_LUKS2 RBD_ENCRYPTION_ALGORITHM_AES256
    }
}

fn compile(source: &str) -> Result<(), String> {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("check.c");
    std::fs::write(&file, source).unwrap();
    let output = Command::new("cc")
        .args(["-fsyntax-only", "-Wno-deprecated-declarations", "-std=gnu11"])
        .arg(Path::new(&file))
        .output()
        .map_err(|error| format!("cc: {error}"))?;
    let complaint = String::from_utf8_lossy(&output.stderr).into_owned();
    if output.status.success() { Ok(()) } else { Err(complaint) }
}

#[test]
fn every_symbol_is_named_once() {
    let mut names: Vec<&CStr> =
        Librados::SYMBOLS.iter().chain(Librbd::SYMBOLS).map(|symbol| symbol.name).collect();
    names.sort();
    let count = names.len();
    names.dedup();
    assert_eq!(names.len(), count);
    assert!(Librbd::SYMBOLS.iter().any(|symbol| !symbol.required));
}
