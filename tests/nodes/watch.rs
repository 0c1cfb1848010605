//! Watches of the API server that last as long as a test.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::sync::Mutex;
use std::time::Duration;

use serde_json::Value;

/// For how long the API server may serve a watch. It ends one without this parameter after 30 to 60 minutes.
const SECONDS: u32 = 86_400;

/// The pause before a watch that has ended begins again.
const PAUSE: Duration = Duration::from_millis(200);

/// A watch of the objects at a path. It begins again when it ends.
#[derive(Default)]
pub(crate) struct Watch(Mutex<State>);

#[derive(Default)]
struct State {
    process: Option<Child>,
    is_over: bool,
}

impl Watch {
    /// Calls `see` with each event and its object, until [`Watch::end`] is called. `request` returns the command that prints
    /// the answer of the API server to a query. A watch that begins again reports what has happened meanwhile, or each
    /// object as `ADDED` if the API server does not know that any more.
    pub(crate) fn follow(
        &self,
        request: impl Fn(&str) -> Command,
        mut see: impl FnMut(String, Value),
    ) {
        let mut version = String::new();
        let query =
            |version: &str| format!("watch=1&timeoutSeconds={SECONDS}&resourceVersion={version}");
        while let Some(lines) = self.begin(request(&query(&version))) {
            // A version that brings no event may be too old.
            version.clear();
            for line in lines {
                // The last line is not complete if the process was killed.
                let Ok(mut change) = serde_json::from_str::<Value>(&line) else { break };
                let event = change["type"].as_str().unwrap().to_owned();
                if event == "ERROR" {
                    version.clear();
                    break;
                }
                let object = change["object"].take();
                let known = &object["metadata"]["resourceVersion"];
                known.as_str().unwrap_or_default().clone_into(&mut version);
                see(event, object);
            }
            std::thread::sleep(PAUSE);
        }
    }

    /// Starts a process, and returns its lines. Returns `None` if the watch has ended.
    fn begin(&self, mut command: Command) -> Option<impl Iterator<Item = String> + use<>> {
        let mut state = self.0.lock().unwrap();
        if let Some(mut before) = state.process.take() {
            let _ = before.wait();
        }
        if state.is_over {
            return None;
        }
        let mut process = command.stdout(Stdio::piped()).spawn().unwrap();
        let lines = BufReader::new(process.stdout.take().unwrap()).lines();
        state.process = Some(process);
        Some(lines.map_while(Result::ok))
    }

    /// Ends the watch.
    pub(crate) fn end(&self) {
        let mut state = self.0.lock().unwrap();
        state.is_over = true;
        if let Some(mut process) = state.process.take() {
            let _ = process.kill();
            let _ = process.wait();
        }
    }
}

/// The API server ends the watch after each event, and at last does not know the version any more.
#[test]
fn a_watch_that_ends_begins_again_where_it_has_ended() {
    let event = |kind: &str, version: &str| {
        format!(r#"{{"type":"{kind}","object":{{"metadata":{{"resourceVersion":"{version}"}}}}}}"#)
    };
    let (watch, mut seen) = (Watch::default(), Vec::new());
    let request = |query: &str| {
        let (rest, version) = query.rsplit_once('=').unwrap();
        assert_eq!(rest, "watch=1&timeoutSeconds=86400&resourceVersion");
        let answer = match version {
            "" => event("ADDED", "1"),
            "1" => event("MODIFIED", "2"),
            _ => event("ERROR", ""),
        };
        let mut command = Command::new("echo");
        command.arg(answer);
        command
    };
    watch.follow(request, |kind, object| {
        seen.push(format!("{kind} {}", object["metadata"]["resourceVersion"]));
        if seen.len() == 3 {
            watch.end();
        }
    });
    assert_eq!(seen, [r#"ADDED "1""#, r#"MODIFIED "2""#, r#"ADDED "1""#]);
}
