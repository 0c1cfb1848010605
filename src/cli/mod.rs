//! The command line: what the user types becomes one call, its result becomes text or JSON.
//!
//! Comes in: arguments and environment. Goes out: stdout for results, stderr for errors and notes,
//! an exit code ([`exit`]). One file per subcommand holds its clap types, its examples (shown by
//! `--help` and in the manual alike) and its printing. What may never happen here: a decision about
//! a device. Clients know the daemon only through its API ([`client`]); `node`, `worker` and `serve`
//! hand over to `control`, `worker` and `data`. Nothing prints but [`output`].

mod client;
mod completions;
mod doctor;
pub mod exit;
#[cfg(feature = "fault")]
mod fault;
mod fence;
mod ls;
mod man;
mod map;
mod metrics;
mod node;
pub mod output;
mod progress;
mod resize;
mod serve;
mod set;
mod size;
mod stats;
mod status;
mod unmap;
mod upgrade;
mod version;
mod view;
mod volume;

use std::ffi::OsString;
use std::path::PathBuf;

use clap::error::ErrorKind as Usage;
use clap::parser::ValueSource;
use clap::{CommandFactory, FromArgMatches};

use cleat_core::error::{Error, ErrorKind, Result};
use output::Format;

/// Where the daemon listens, unless told otherwise.
pub const DEFAULT_SOCKET: &str = "/run/cleat/cleat.sock";

const EXAMPLES: &str = "\
Examples:
  Is this machine ready?
    $ cleat doctor

  Start the daemon:
    $ sudo systemctl start cleat

  Make a volume a device, put a filesystem on it, take it away again:
    $ dev=$(cleat map file:/var/lib/images/a.img)
    $ mkfs.ext4 \"$dev\" && mount \"$dev\" /mnt
    $ umount /mnt && cleat unmap \"$dev\"

Each command has examples of its own: cleat map --help
";

/// Make volumes fast to this node as block devices
///
/// The daemon (`cleat node`) turns volumes - raw files, block devices, memory, RBD images - into
/// block devices /dev/nbdX and holds them: one process a volume, which outlives the daemon. The other
/// commands talk to it over its socket.
#[derive(Debug, clap::Parser)]
#[command(
    name = "cleat",
    version,
    long_version = version::LONG,
    after_long_help = EXAMPLES,
    max_term_width = 100,
    subcommand_required = true,
    arg_required_else_help = true
)]
pub struct Cli {
    #[command(flatten)]
    globals: Globals,
    #[command(subcommand)]
    command: Command,
}

/// Options of every command.
#[derive(Debug, Clone, clap::Args)]
#[command(next_help_heading = "Global options")]
pub struct Globals {
    /// The daemon's socket [default: /run/cleat/cleat.sock]
    #[arg(long, global = true, env = "CLEAT_SOCKET", value_name = "PATH")]
    pub socket: Option<PathBuf>,
    /// Whether `socket` was typed, and is not from the environment.
    #[arg(skip)]
    pub socket_typed: bool,
    /// How results are shown [default: what suits the command]
    #[arg(short, long, global = true, value_name = "FORMAT")]
    pub output: Option<Format>,
    /// Say more on stderr; twice: more still
    #[arg(short, long, global = true, action = clap::ArgAction::Count)]
    pub verbose: u8,
}

#[derive(Debug, clap::Subcommand)]
enum Command {
    Node(node::Node),
    Map(map::Map),
    Unmap(unmap::Unmap),
    Ls(ls::Ls),
    Status(status::Status),
    Stats(stats::Stats),
    Metrics(metrics::Metrics),
    Resize(resize::Resize),
    Upgrade(upgrade::Upgrade),
    Set(set::Set),
    Volume(volume::Volume),
    Serve(serve::Serve),
    Doctor(doctor::Doctor),
    Fence(fence::Fence),
    #[cfg(feature = "fault")]
    Fault(fault::Fault),
    Completions(completions::Completions),
    Man(man::Man),
}

/// Runs the command line of this process and returns its exit code.
pub fn main() -> u8 {
    let arguments: Vec<OsString> = std::env::args_os().collect();
    match parse(&arguments) {
        Ok(cli) => {
            let format = cli.globals.output;
            run(cli).unwrap_or_else(|error| output::error(&error, format))
        }
        Err(error) => not_parsed(&error, &arguments),
    }
}

fn parse(arguments: &[OsString]) -> Result<Cli, clap::Error> {
    let matches = Cli::command().try_get_matches_from(arguments)?;
    let mut cli = Cli::from_arg_matches(&matches)?;
    cli.globals.socket_typed = matches.value_source("socket") == Some(ValueSource::CommandLine);
    Ok(cli)
}

fn run(cli: Cli) -> Result<u8> {
    let globals = &cli.globals;
    match cli.command {
        Command::Doctor(args) => return doctor::run(globals, &args),
        Command::Unmap(args) => return unmap::run(globals, args),
        Command::Volume(args) => return volume::run(globals, args),
        Command::Node(args) => node::run(globals, args),
        Command::Map(args) => map::run(globals, args),
        Command::Ls(args) => ls::run(globals, &args),
        Command::Status(args) => status::run(globals, args),
        Command::Stats(args) => stats::run(globals, args),
        Command::Metrics(args) => metrics::run(globals, args),
        Command::Resize(args) => resize::run(globals, args),
        Command::Upgrade(args) => upgrade::run(globals, args),
        Command::Set(args) => set::run(globals, args),
        Command::Serve(args) => serve::run(globals, args),
        Command::Fence(args) => fence::run(globals, args),
        #[cfg(feature = "fault")]
        Command::Fault(args) => fault::run(globals, args),
        Command::Completions(args) => completions::run(&args),
        Command::Man(args) => man::run(&args),
    }
    .map(|()| exit::OK)
}

/// Help and version are results; everything else that clap says is an error of usage, and looks as
/// every other error.
fn not_parsed(error: &clap::Error, arguments: &[OsString]) -> u8 {
    let rendered = error.render();
    match error.kind() {
        Usage::DisplayHelp | Usage::DisplayVersion => {
            let styled = if output::is_terminal() && std::env::var_os("NO_COLOR").is_none() {
                rendered.ansi().to_string()
            } else {
                rendered.to_string()
            };
            return match output::text(&styled) {
                Ok(()) => exit::OK,
                Err(error) => output::error(&error, None),
            };
        }
        _ => {}
    }
    output::error(&usage_error(error), wanted_format(arguments))
}

fn usage_error(refused: &clap::Error) -> Error {
    let error = |message: &str| Error::new(ErrorKind::InvalidArgument, message);
    let kind = refused.kind();
    // The second kind is what it becomes when CLEAT_SOCKET is set.
    let nothing = [Usage::DisplayHelpOnMissingArgumentOrSubcommand, Usage::MissingSubcommand];
    if nothing.contains(&kind) {
        return error("no command was given").with_repair("see what there is: cleat --help");
    }
    // clap's text: "error: " and the cause, then paragraphs of tips and the usage.
    let rendered = refused.render().to_string();
    let text = rendered.strip_prefix("error: ").unwrap_or(&rendered).trim();
    let (cause, rest) = text.split_once("\n\n").unwrap_or((text, ""));
    let cause = cause.split_whitespace().collect::<Vec<_>>().join(" ");
    let usage = rest.lines().find_map(|line| line.trim().strip_prefix("Usage: "));
    let tip = rest.lines().find_map(|line| line.trim().strip_prefix("tip: "));
    // Where one of our own types refused its value, it knows best.
    let source = std::error::Error::source(refused).and_then(|e| e.downcast_ref::<Error>());
    let repair: Vec<String> = [
        source.and_then(Error::repair).map(str::to_owned),
        tip.map(str::to_owned),
        usage.map(|usage| format!("usage: {usage}")),
        Some("see --help for what is possible, with examples".to_owned()),
    ]
    .into_iter()
    .flatten()
    .collect();
    error(&cause).with_repair(repair.join("\n"))
}

/// The format asked for, as far as it can be told from arguments that were not understood.
fn wanted_format(arguments: &[OsString]) -> Option<Format> {
    let words: Vec<&str> = arguments.iter().filter_map(|word| word.to_str()).collect();
    let apart = words.windows(2).any(|pair| matches!(pair, ["-o" | "--output", "json"]));
    let joined = words.iter().any(|word| matches!(*word, "-ojson" | "-o=json" | "--output=json"));
    (apart || joined).then_some(Format::Json)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_definitions_are_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn every_visible_command_teaches_with_examples_and_is_in_the_readme() {
        let readme = include_str!("../../README.md");
        for command in Cli::command().get_subcommands() {
            let name = command.get_name();
            assert_teaches(command);
            let shown = readme.contains(&format!("`cleat {name}`"));
            assert!(shown || command.is_hide_set() || name == "fault", "{name} is missing");
        }
    }

    fn assert_teaches(command: &clap::Command) {
        let help = command.get_after_long_help().map(ToString::to_string).unwrap_or_default();
        assert!(help.starts_with("Examples:\n"), "{} has no examples", command.get_name());
        command.get_subcommands().for_each(assert_teaches);
    }

    #[test]
    fn an_error_of_usage_names_cause_and_repair() {
        let words = ["cleat", "map", "mem:1G", "--conections", "2"].map(OsString::from);
        let error = parse(&words).expect_err("the option is misspelt");
        let error = usage_error(&error);
        assert_eq!(error.kind(), ErrorKind::InvalidArgument);
        assert_eq!(error.message(), "unexpected argument '--conections' found");
        let repair = error.repair().expect("there is one");
        assert!(repair.contains("'--connections'"), "{repair}");
        assert!(repair.contains("usage: cleat map"), "{repair}");
    }

    #[test]
    fn what_a_volume_uri_knows_of_its_repair_is_not_lost() {
        let words = ["cleat", "serve", "/dev/vdb", "--listen", "127.0.0.1:0"].map(OsString::from);
        let error = usage_error(&parse(&words).expect_err("it has no scheme"));
        assert!(error.message().contains("has no scheme"), "{}", error.message());
        assert!(error.repair().is_some_and(|text| text.contains("file:/dev/vdb")), "{error:?}");
    }

    #[test]
    fn a_socket_that_was_typed_is_told_from_one_of_the_environment() {
        let typed = |line: &str| {
            let words: Vec<OsString> = line.split(' ').map(OsString::from).collect();
            parse(&words).expect("the line is right").globals.socket_typed
        };
        assert!(typed("cleat --socket /run/a ls"));
        assert!(typed("cleat ls --socket /run/a"));
        assert!(!typed("cleat ls"));
    }

    #[test]
    fn json_is_wanted_even_where_the_rest_is_not_understood() {
        let wanted = |line: &str| {
            let words: Vec<OsString> = line.split(' ').map(OsString::from).collect();
            wanted_format(&words)
        };
        assert_eq!(wanted("cleat frob -o json"), Some(Format::Json));
        assert_eq!(wanted("cleat --output=json map"), Some(Format::Json));
        assert_eq!(wanted("cleat frob -o table"), None);
    }
}
