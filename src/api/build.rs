//! Compiles the control API's protocol file with a compiler written in Rust, so that no `protoc` is
//! needed.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo:rerun-if-changed=../../proto/cleat");
    println!("cargo:rerun-if-changed=build.rs");
    let mut sources = vec!["cleat/v1/node.proto"];
    if std::env::var_os("CARGO_FEATURE_FAULT").is_some() {
        sources.push("cleat/v1/fault.proto");
    }
    let files = protox::compile(sources, ["../../proto"])?;
    tonic_prost_build::configure().compile_fds(files)?;
    Ok(())
}
