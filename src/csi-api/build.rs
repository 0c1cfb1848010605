//! Compiles the protocol files with a compiler written in Rust, so that no `protoc` is needed.
//!
//! Messages with secrets get a `Debug` that prints only the keys of the secrets. It is generated for every
//! message with a field `secrets`, so that no message can be forgotten.

use std::env;
use std::error::Error;
use std::fmt::Write as _;
use std::fs;
use std::path::PathBuf;

use prost_types::{DescriptorProto, FileDescriptorSet};

const SOURCES: [&str; 9] = [
    "csi/v1/controller.proto",
    "csi/v1/group_controller.proto",
    "csi/v1/identity.proto",
    "csi/v1/node.proto",
    "csi/v1/snapshot_metadata.proto",
    "csiaddons/fence.proto",
    "csiaddons/identity.proto",
    "csiaddons/reclaimspace.proto",
    "pluginregistration/v1/registration.proto",
];

/// The packages, and the modules of `lib.rs` that hold them.
const MODULES: [(&str, &str); 5] = [
    ("csi.v1", "csi::v1"),
    ("fence", "addons::fence"),
    ("identity", "addons::identity"),
    ("pluginregistration", "pluginregistration"),
    ("reclaimspace", "addons::reclaimspace"),
];

fn main() -> Result<(), Box<dyn Error>> {
    for input in ["csi", "csiaddons", "pluginregistration"] {
        println!("cargo:rerun-if-changed=../../proto/{input}");
    }
    println!("cargo:rerun-if-changed=build.rs");
    let out = PathBuf::from(env::var("OUT_DIR")?);
    let mut compiler = protox::Compiler::new(["../../proto"])?;
    compiler.include_imports(true).open_files(SOURCES)?;
    // For callers that choose a call when they run, and for the test that compares them with the published ones.
    fs::write(out.join("descriptors.bin"), compiler.encode_file_descriptor_set())?;

    let files = compiler.include_source_info(true).file_descriptor_set();
    let secret = with_secrets(&files);
    fs::write(out.join("debug.rs"), debug_of(&secret)?)?;
    let names = secret.iter().map(|(package, message)| format!("{package}.{}", message.name()));
    tonic_prost_build::configure()
        // Maps with a fixed order: equal messages have equal bytes.
        .btree_map(".")
        // A service may have some of the calls. The others answer UNIMPLEMENTED.
        .generate_default_stubs(true)
        .skip_debug(names)
        .compile_fds(files)?;
    Ok(())
}

/// Returns the messages that have a field `secrets`, with their packages.
fn with_secrets(files: &FileDescriptorSet) -> Vec<(&str, &DescriptorProto)> {
    let has_secrets =
        |message: &&DescriptorProto| message.field.iter().any(|field| field.name() == "secrets");
    let messages = |file| {
        let file: &prost_types::FileDescriptorProto = file;
        file.message_type.iter().filter(has_secrets).map(|message| (file.package(), message))
    };
    files.file.iter().flat_map(messages).collect()
}

/// Returns the source of `Debug` for messages with secrets.
fn debug_of(messages: &[(&str, &DescriptorProto)]) -> Result<String, Box<dyn Error>> {
    let mut source = String::new();
    for (package, message) in messages {
        let module = MODULES.iter().find(|(name, _)| name == package);
        let (_, module) = module.ok_or_else(|| format!("{package} has no module"))?;
        let name = message.name();
        writeln!(source, "impl fmt::Debug for crate::{module}::{name} {{")?;
        writeln!(source, "    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {{")?;
        writeln!(source, "        f.debug_struct({name:?})")?;
        for field in message.field.iter().map(prost_types::FieldDescriptorProto::name) {
            let value = match field {
                "secrets" => "&Keys(&self.secrets)".to_owned(),
                field => format!("&self.{field}"),
            };
            writeln!(source, "            .field({field:?}, {value})")?;
        }
        writeln!(source, "            .finish()\n    }}\n}}\n")?;
    }
    Ok(source)
}
