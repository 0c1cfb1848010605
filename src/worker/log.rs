//! Where a worker's log goes. Set up before the confinement, since it may open a socket.

use tracing_subscriber::filter::LevelFilter;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;

/// Starts logging as the supervisor chose: `journald`, `json`, or anything else for text; the last
/// two to stderr, which is the supervisor's.
pub(super) fn init(choice: &str) {
    let registry = tracing_subscriber::registry().with(LevelFilter::INFO);
    let text = tracing_subscriber::fmt::layer().with_writer(std::io::stderr).with_ansi(false);
    // A second logger in one process is the only possible failure, and then there is one already.
    let _ = match choice {
        "journald" => match tracing_journald::layer() {
            Ok(journal) => registry.with(journal).try_init(),
            Err(_) => registry.with(text).try_init(),
        },
        "json" => registry.with(text.json()).try_init(),
        _ => registry.with(text).try_init(),
    };
}
