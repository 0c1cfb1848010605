//! Compiles the control API's protocol file with a compiler written in Rust, so that no `protoc` is
//! needed.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo:rerun-if-changed=../../proto");
    println!("cargo:rerun-if-changed=build.rs");
    let files = protox::compile(["cleat/v1/node.proto"], ["../../proto"])?;
    tonic_prost_build::configure().compile_fds(files)?;
    Ok(())
}
