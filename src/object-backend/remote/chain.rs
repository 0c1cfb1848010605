//! The usual sources of credentials, for URIs without `credentials_file=`: the order is that of AWS's own clients.
//!
//! The process that opens a volume uses them: the command, or for a mapping the supervisor, which passes the keys to the
//! worker over a descriptor and looks every few seconds whether they have changed. A worker never uses them.
//!
//! The first source that is set up decides. If it fails, no other one is tried: a program must not silently work as
//! another client. Temporary keys are replaced 5 minutes before they expire, by the crate `object_store`.

mod failure;
mod fetch;
mod sources;
#[cfg(test)]
mod tests;

use std::fmt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use object_store::aws::AwsCredentialProvider;
use zeroize::Zeroizing;

use cleat_backend::{Credentials, FoundSecret, SecretSource};
use cleat_core::clock::{Clock, SystemClock};
use cleat_core::error::{Error, ErrorKind, Result};

use super::bucket::{Bucket, Provider};
use super::origin::Origin;
use failure::Failure;
use sources::{Answer, Service};

/// How long an answer of a service is used without another call, also if it was an error.
const RECHECK: Duration = Duration::from_secs(20);

/// The maximum number of different places whose keys are kept.
const MAX_CHAINS: usize = 16;

/// The number of secrets that this process has found.
static VERSIONS: AtomicU64 = AtomicU64::new(0);

/// The chains of this process: all volumes of a place share one, so that a service is asked once for all of them.
static CHAINS: Mutex<Vec<Arc<Chain>>> = Mutex::new(Vec::new());

/// Returns the value of a variable.
type Environment = Box<dyn Fn(&str) -> Option<String> + Send + Sync>;

/// Returns the usual sources of the credentials for a bucket.
pub(super) fn shared(bucket: &Bucket) -> Arc<Chain> {
    let place = Place {
        provider: bucket.provider,
        region: bucket.region.clone(),
        trusted: bucket.trusted_file(),
    };
    let mut chains = CHAINS.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(chain) = chains.iter().find(|chain| chain.place == place) {
        return Arc::clone(chain);
    }
    let variables = |name: &str| std::env::var(name).ok();
    let chain = Arc::new(Chain::new(place, Box::new(variables), RECHECK));
    if chains.len() == MAX_CHAINS {
        chains.remove(0);
    }
    chains.push(Arc::clone(&chain));
    chain
}

/// What the keys depend on, beside the environment.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Place {
    provider: Provider,
    region: String,
    /// The file with the certificates to trust.
    trusted: Option<PathBuf>,
}

/// The usual sources.
pub(super) struct Chain {
    place: Place,
    environment: Environment,
    recheck: Duration,
    state: Mutex<State>,
}

/// What was found until now.
#[derive(Default)]
struct State {
    /// The last secret, and its version.
    last: Option<(Zeroizing<Vec<u8>>, u64)>,
    /// The service that gives the keys.
    service: Option<Given>,
}

/// A service, and what it has answered.
struct Given {
    service: Service,
    provider: AwsCredentialProvider,
    /// The last keys, as the content of a file.
    content: Option<Zeroizing<Vec<u8>>>,
    /// When it was asked last.
    asked: Option<Instant>,
    /// Why the last call failed.
    failure: Option<Failure>,
}

impl SecretSource for Chain {
    fn find(&self) -> Result<FoundSecret> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let content = match self.place.provider {
            Provider::Amazon => self.amazon(&mut state)?,
            Provider::Google => sources::google(&self.variables())?,
            Provider::Azure => sources::azure(&self.variables())?,
        };
        let version = match &state.last {
            Some((last, version)) if *last == content => *version,
            _ => VERSIONS.fetch_add(1, Ordering::Relaxed) + 1,
        };
        state.last = Some((content.clone(), version));
        Ok(FoundSecret { secret: Credentials::new(content), version })
    }
}

impl Chain {
    fn new(place: Place, environment: Environment, recheck: Duration) -> Self {
        Self { place, environment, recheck, state: Mutex::default() }
    }

    /// A variable without a value is not set.
    fn variables(&self) -> impl Fn(&str) -> Option<String> {
        |name: &str| (self.environment)(name).filter(|value| !value.is_empty())
    }

    fn amazon(&self, state: &mut State) -> Result<Zeroizing<Vec<u8>>> {
        let mut reasons = Vec::new();
        for source in sources::ALL {
            match source(&self.variables(), &self.place.region)? {
                Answer::Keys(keys, origin) => {
                    return keys.content(origin).map_err(|why| unusable(origin, why).error());
                }
                Answer::Service(service) => match self.given(state, service) {
                    Ok(content) => return Ok(content),
                    // Nothing asks for the metadata service, so its failure is only the last reason.
                    Err(Failure { is_default: true, message, .. }) => reasons.push(message),
                    Err(failure) => return Err(failure.error()),
                },
                Answer::Nothing(why) => reasons.push(why),
            }
        }
        let message = format!(
            "the URI has no credentials_file=, and none of the usual sources has credentials: {}",
            reasons.join("; ")
        );
        Err(Error::new(ErrorKind::NotFound, message).with_repair(
            "add credentials_file=/PATH to the URI, or set up a source for the process that opens the volume: for a \
             mapping that is the daemon (systemctl edit cleat)",
        ))
    }

    /// Returns the keys that a service gives. If it fails, the last ones stay in use.
    fn given(
        &self,
        state: &mut State,
        service: Service,
    ) -> std::result::Result<Zeroizing<Vec<u8>>, Failure> {
        let known = state.service.take().filter(|given| given.service == service);
        let given = match known {
            Some(given) => given,
            None => Given::new(service, self.place.trusted.clone())?,
        };
        let given = state.service.insert(given);
        let is_recent = |asked| SystemClock.elapsed_since(asked) < self.recheck;
        if !given.asked.is_some_and(is_recent) {
            given.ask();
        }
        match (&given.content, &given.failure) {
            (Some(content), _) => Ok(content.clone()),
            (None, Some(failure)) => Err(failure.clone()),
            (None, None) => Err(unusable(given.service.origin(), "there are none")),
        }
    }
}

impl Given {
    fn new(service: Service, trusted: Option<PathBuf>) -> std::result::Result<Self, Failure> {
        let provider = fetch::provider(&service, trusted)?;
        Ok(Self { service, provider, content: None, asked: None, failure: None })
    }

    fn ask(&mut self) {
        let origin = self.service.origin();
        let keys = fetch::keys(&self.provider, &self.service);
        let content =
            keys.and_then(|keys| keys.content(origin).map_err(|why| unusable(origin, why)));
        self.asked = Some(SystemClock.now());
        match content {
            Ok(content) => {
                self.content = Some(content);
                self.failure = None;
            }
            Err(failure) => {
                if self.content.is_some() && self.failure.as_ref() != Some(&failure) {
                    tracing::warn!(
                        "the last keys stay in use: {}; {}",
                        failure.message,
                        failure.repair
                    );
                }
                self.failure = Some(failure);
            }
        }
    }
}

fn unusable(origin: Origin, why: &str) -> Failure {
    Failure {
        kind: ErrorKind::InvalidArgument,
        message: format!("the keys from {origin} cannot be used: {why}"),
        repair: "add credentials_file=/PATH to the URI, which has precedence".to_owned(),
        is_default: false,
    }
}

impl fmt::Debug for Chain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Chain").field(&self.place).finish()
    }
}
