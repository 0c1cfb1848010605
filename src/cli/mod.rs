//! The command line: each command makes one call or a few calls and prints the result as text or JSON.
//!
//! - Input: arguments and environment.
//! - Output: results on stdout, errors and notes on stderr, and an exit code ([`exit`]).
//!
//! Each subcommand has a file with its clap types, its examples (for `--help` and the manual) and its output.
//! Commands reach the daemon only through its API ([`client`]). `node` runs the daemon of `cleat-node`, and
//! `serve` the server of `cleat-export`. Only [`output`] prints.
//!
//! Never allowed here: a decision about a device.

mod client;
mod completions;
mod doctor;
pub mod exit;
#[cfg(feature = "fault")]
mod fault;
mod fence;
#[cfg(feature = "kubernetes")]
mod kubernetes;
mod ls;
mod man;
mod map;
mod metrics;
mod node;
pub mod output;
mod plugin;
mod progress;
mod release_devices;
mod resize;
mod serve;
mod set;
mod size;
mod space;
mod stats;
mod status;
mod unmap;
mod upgrade;
mod version;
mod view;
mod volume;

use std::ffi::OsString;
use std::path::PathBuf;

use clap::error::{ContextKind, ContextValue, ErrorKind as Usage};
use clap::parser::ValueSource;
use clap::{CommandFactory, FromArgMatches};

use crate::features::Feature;
use cleat_backend::uri::shown;
use cleat_core::error::{Error, ErrorKind, Result};
use output::Format;

/// The daemon's default socket.
pub const DEFAULT_SOCKET: &str = "/run/cleat/cleat.sock";

const EXAMPLES: &str = "\
Examples:
  Check this machine:
    $ cleat doctor

  Start the daemon:
    $ sudo systemctl start cleat

  Map a volume to a device, create a filesystem on it, and unmap it:
    $ dev=$(cleat map file:/var/lib/images/a.img)
    $ mkfs.ext4 \"$dev\" && mount \"$dev\" /mnt
    $ umount /mnt && cleat unmap \"$dev\"

Each command has examples: cleat map --help
";

/// Attach volumes to this node as block devices
///
/// The daemon (`cleat node`) maps volumes - raw files, block devices, memory, RBD images - to block devices
/// /dev/nbdX. One process serves each volume and continues when the daemon ends. The other commands connect
/// to the daemon's socket.
#[derive(Debug, clap::Parser)]
#[command(
    name = "cleat",
    version,
    long_version = version::long(),
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

/// The options of every command.
#[derive(Debug, Clone, clap::Args)]
#[command(next_help_heading = "Global options")]
pub struct Globals {
    /// The daemon's socket [default: /run/cleat/cleat.sock]
    #[arg(long, global = true, env = "CLEAT_SOCKET", value_name = "PATH")]
    pub socket: Option<PathBuf>,
    /// Whether `socket` comes from the command line and not from the environment.
    #[arg(skip)]
    pub socket_typed: bool,
    /// The format of results [default: depends on the command]
    #[arg(short, long, global = true, value_name = "FORMAT")]
    pub output: Option<Format>,
    /// Print more on stderr; twice: even more
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
    Volume(volume::VolumeCommand),
    Serve(serve::Serve),
    Doctor(doctor::Doctor),
    Fence(fence::Fence),
    #[cfg(feature = "kubernetes")]
    #[command(flatten)]
    Kubernetes(kubernetes::Command),
    ReleaseDevices(release_devices::ReleaseDevices),
    #[cfg(feature = "fault")]
    Fault(fault::Fault),
    Completions(completions::Completions),
    Man(man::Man),
}

/// Runs the command line of this process and returns its exit code.
pub fn main() -> u8 {
    let arguments = plugin::as_plugin(std::env::args_os().collect());
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
        #[cfg(feature = "kubernetes")]
        Command::Kubernetes(command) => return kubernetes::run(globals, command),
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
        Command::ReleaseDevices(_) => release_devices::run(globals),
        #[cfg(feature = "fault")]
        Command::Fault(args) => fault::run(globals, args),
        Command::Completions(args) => completions::run(&args),
        Command::Man(args) => man::run(&args),
    }
    .map(|()| exit::OK)
}

/// Prints what clap returned instead of a command. Help and version are results. Everything else is an error of
/// usage, in the form of all errors.
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

/// The messages of `std::num::ParseIntError`, and what they mean for the value of an option.
const NUMBER_ERRORS: [(&str, &str); 3] = [
    ("invalid digit found in string", "it must be a whole number, without a sign or a unit"),
    ("cannot parse integer from empty string", "it must be a whole number"),
    ("number too large to fit in target type", "the number is too large"),
];

fn usage_error(refused: &clap::Error) -> Error {
    let error = |message: &str| Error::new(ErrorKind::InvalidArgument, message);
    let kind = refused.kind();
    // clap returns the second kind if CLEAT_SOCKET is set.
    let missing = [Usage::DisplayHelpOnMissingArgumentOrSubcommand, Usage::MissingSubcommand];
    if missing.contains(&kind) {
        return error("no command was given").with_repair("list the commands with `cleat --help`");
    }
    if let Some(error) = absent_command(refused) {
        return error;
    }
    // The text of clap is "error: " and the cause, followed by paragraphs of tips and the usage.
    let rendered = without_options(refused, refused.render().to_string());
    let text = rendered.strip_prefix("error: ").unwrap_or(&rendered).trim();
    let (cause, rest) = text.split_once("\n\n").unwrap_or((text, ""));
    let mut cause = cause.split_whitespace().collect::<Vec<_>>().join(" ");
    for (of_std, plain) in NUMBER_ERRORS {
        cause = cause.replace(of_std, plain);
    }
    let usage = rest.lines().find_map(|line| line.trim().strip_prefix("Usage: "));
    let tip = rest.lines().find_map(|line| line.trim().strip_prefix("tip: "));
    // If a value parser of cleat refused the value, its error has the best hint.
    let source = std::error::Error::source(refused).and_then(|e| e.downcast_ref::<Error>());
    let repair: Vec<String> = [
        source.and_then(Error::repair).map(str::to_owned),
        tip.map(str::to_owned),
        usage.map(|usage| format!("usage: {usage}")),
        Some("see --help for all options, with examples".to_owned()),
    ]
    .into_iter()
    .flatten()
    .collect();
    error(&cause).with_repair(repair.join("\n"))
}

/// Returns the error for a command that other builds of this program have.
fn absent_command(refused: &clap::Error) -> Option<Error> {
    let Some(ContextValue::String(name)) = refused.get(ContextKind::InvalidSubcommand) else {
        return None;
    };
    Some(Feature::of_command(name)?.absent(&format!("cannot run `cleat {name}`")))
}

/// Shortens the values that clap repeats in `text`: options of a URI may contain a secret, which is then refused,
/// and must not appear in a log.
fn without_options(refused: &clap::Error, mut text: String) -> String {
    for (_, value) in refused.context() {
        let ContextValue::String(value) = value else { continue };
        let short = shown(value);
        if short != *value {
            // clap escapes values that contain white space.
            text = text.replace(&value.escape_debug().to_string(), &short).replace(value, &short);
        }
    }
    text
}

/// Returns the requested output format, as far as arguments that clap has refused show it.
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
    fn every_visible_command_has_examples_and_is_in_the_readme() {
        let readme = include_str!("../../README.md");
        for command in Cli::command().get_subcommands() {
            let name = command.get_name();
            assert_has_examples(command);
            let shown = readme.contains(&format!("`cleat {name}`"));
            assert!(shown || command.is_hide_set() || name == "fault", "{name} is missing");
        }
    }

    fn assert_has_examples(command: &clap::Command) {
        let help = command.get_after_long_help().map(ToString::to_string).unwrap_or_default();
        assert!(help.starts_with("Examples:\n"), "{} has no examples", command.get_name());
        command.get_subcommands().for_each(assert_has_examples);
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
    fn a_command_that_was_left_out_names_its_feature() {
        let smaller = clap::Command::new("cleat").subcommand(clap::Command::new("map"));
        for (command, feature) in [("csi", Some("`kubernetes`")), ("frob", None)] {
            let words = ["cleat", command, "--unknown"];
            let error = usage_error(&smaller.clone().try_get_matches_from(words).unwrap_err());
            let named = error.message().split("without the feature ").nth(1);
            assert_eq!(named, feature, "{error}");
        }
    }

    #[test]
    fn the_commands_of_features_exist() {
        let cli = Cli::command();
        for feature in crate::features::ALL.iter().filter(|feature| feature.is_present) {
            for name in feature.commands {
                assert!(cli.find_subcommand(name).is_some(), "{name} is missing");
            }
        }
    }

    #[test]
    fn a_number_that_is_none_is_refused_in_plain_words() {
        for (option, value, cause) in [
            ("--iops", "-1", "a whole number, without a sign"),
            ("--iops", "500K", "a whole number, without a sign or a unit"),
            ("--iops", "99999999999999999999", "too large"),
            ("--connections", "many", "a whole number"),
        ] {
            let words = ["cleat", "map", "mem:1G", option, value].map(OsString::from);
            let error = usage_error(&parse(&words).expect_err(value));
            assert!(error.message().contains(cause), "{value}: {}", error.message());
            assert!(error.message().contains(option), "{value}: {}", error.message());
        }
    }

    #[test]
    fn the_hint_of_a_refused_uri_is_shown() {
        let words = ["cleat", "serve", "/dev/vdb", "--listen", "127.0.0.1:0"].map(OsString::from);
        let error = usage_error(&parse(&words).expect_err("it has no scheme"));
        assert!(error.message().contains("has no scheme"), "{}", error.message());
        assert!(error.repair().is_some_and(|text| text.contains("file:/dev/vdb")), "{error:?}");
    }

    #[test]
    fn a_refused_secret_is_not_shown() {
        const SECRET: &str = "AQsecret";
        for uri in [
            "rbd:p/i?config.key=AQsecret==",
            "rbd:p/i?config.key=AQsecret x==",
            "rbd:p/i?config.key=AQsecret%zz",
            "rbd:p/i?keyring=AQsecret==",
            "rbd:p/i?direct=AQsecret==",
        ] {
            let words = ["cleat", "serve", uri, "--listen", "127.0.0.1:0"].map(OsString::from);
            let error = usage_error(&parse(&words).expect_err(uri));
            let shown = format!("{} {:?}", error.report(), error.repair());
            assert!(!shown.contains(SECRET), "{shown}");
            assert!(shown.contains("'rbd:p/i…'"), "{shown}");
            let error = crate::backends::volume(uri).expect_err(uri);
            let shown = format!("{} {:?}", error.report(), error.repair());
            assert!(!shown.contains(SECRET), "{shown}");
        }
    }

    #[test]
    fn an_overlong_uri_is_shortened() {
        for uri in ["file:/".to_owned() + &"x".repeat(9000), "x".repeat(4000)] {
            let words = ["cleat", "serve", &uri, "--listen", "127.0.0.1:0"].map(OsString::from);
            let error = usage_error(&parse(&words).expect_err("it is refused"));
            let length = error.report().len();
            assert!(length < 500, "a message of {length} bytes");
        }
    }

    #[test]
    fn a_socket_from_the_command_line_differs_from_one_of_the_environment() {
        let typed = |line: &str| {
            let words: Vec<OsString> = line.split(' ').map(OsString::from).collect();
            parse(&words).expect("the line is right").globals.socket_typed
        };
        assert!(typed("cleat --socket /run/a ls"));
        assert!(typed("cleat ls --socket /run/a"));
        assert!(!typed("cleat ls"));
    }

    #[test]
    fn the_json_format_is_found_in_refused_arguments() {
        let wanted = |line: &str| {
            let words: Vec<OsString> = line.split(' ').map(OsString::from).collect();
            wanted_format(&words)
        };
        assert_eq!(wanted("cleat frob -o json"), Some(Format::Json));
        assert_eq!(wanted("cleat --output=json map"), Some(Format::Json));
        assert_eq!(wanted("cleat frob -o table"), None);
    }
}
