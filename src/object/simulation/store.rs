//! A store in memory that fails in every way that real ones do, in an order that the world chooses.
//!
//! An operation waits until the world executes it. A put or deletion may be executed and answered with an error,
//! or answered with an error and executed later, or executed a second time later, also after its caller has
//! ended. A put may be answered with "exists" although it was the one that created the object, or although
//! nothing exists.

use std::collections::BTreeMap;
use std::future::Future;
use std::ops::{Bound, Range};
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard};
use std::task::{Context, Poll, Waker};

use super::ram::Life;
use super::random::Random;
use crate::store::{Pending, Store, StoreError};

/// The names that one listing returns.
const LISTED: usize = 5;

/// The requests that are executed later and were not yet. More of them are forgotten: they never land.
const MAX_LATE: usize = 24;

#[derive(Debug, Clone)]
pub(super) enum Request {
    Create(String, Arc<Vec<u8>>),
    Read(String, Range<u64>),
    List(String, String),
    Delete(String),
    Wait,
}

enum Answer {
    Bytes(Vec<u8>),
    Names(Vec<String>),
    Done,
}

type Result<T> = std::result::Result<T, StoreError>;

struct Operation {
    request: Request,
    actor: usize,
    answer: Option<Result<Answer>>,
    waker: Option<Waker>,
}

/// The objects, and the operations in flight.
#[derive(Default)]
pub(super) struct Cloud {
    pub(super) objects: BTreeMap<String, Arc<Vec<u8>>>,
    operations: BTreeMap<u64, Operation>,
    late: Vec<Request>,
    next: u64,
    /// Of 1000 operations, how many go wrong.
    pub(super) faults: u64,
    /// What happened, if it is recorded.
    pub(super) trace: Option<Vec<String>>,
    /// How many puts were executed.
    pub(super) puts: u64,
    /// Decides when an outage begins; `None` without outages.
    pub(super) outages: Option<Random>,
    /// The operations that an outage still refuses.
    refusals: u64,
}

impl Cloud {
    pub(super) fn note(&mut self, text: impl FnOnce() -> String) {
        if let Some(trace) = &mut self.trace {
            trace.push(text());
        }
    }

    /// The operations that wait for their execution.
    pub(super) fn waiting(&self) -> Vec<u64> {
        let waiting = self.operations.iter().filter(|(_, operation)| operation.answer.is_none());
        waiting.map(|(id, _)| *id).collect()
    }

    /// Executes an operation, well or badly.
    pub(super) fn execute(&mut self, id: u64, random: &mut Random) {
        let Some(operation) = self.operations.get(&id) else { return };
        let (request, actor) = (operation.request.clone(), operation.actor);
        let is_bad = random.below(1000) < self.faults && !matches!(request, Request::Wait);
        let (what, answer) = match (is_bad, self.refusal(&request)) {
            (_, Some(error)) => (" is refused", Err(error)),
            (true, _) => self.fail(&request, random),
            (false, _) => ("", self.apply(&request)),
        };
        self.note(|| {
            let answer = match &answer {
                Ok(_) => String::new(),
                Err(error) => format!(" -> {error}"),
            };
            format!("{actor}: {}{what}{answer}", text(&request))
        });
        let Some(operation) = self.operations.get_mut(&id) else { return };
        operation.answer = Some(answer);
        if let Some(waker) = operation.waker.take() {
            waker.wake();
        }
    }

    /// Returns why an outage refuses an operation. Some outages last for longer than a request is repeated, and in some
    /// the store refuses, as it does with expired credentials.
    fn refusal(&mut self, request: &Request) -> Option<StoreError> {
        let random = self.outages.as_mut().filter(|_| !matches!(request, Request::Wait))?;
        if self.refusals == 0 && random.below(100) == 0 {
            self.refusals = random.choose(&[1, 10, 60]);
        }
        self.refusals = self.refusals.checked_sub(1)?;
        Some(match random.below(2) {
            0 => StoreError::Refused("simulated".into()),
            _ => StoreError::Unclear("simulated outage".into()),
        })
    }

    fn fail(&mut self, request: &Request, random: &mut Random) -> (&'static str, Result<Answer>) {
        let unclear = || Err(StoreError::Unclear("simulated".into()));
        let changes = matches!(request, Request::Create(..) | Request::Delete(_));
        match random.below(7) {
            _ if !changes => ("", unclear()),
            0 => {
                let _ = self.apply(request);
                (" is executed, answer lost", unclear())
            }
            1 | 2 => {
                self.delay(request.clone());
                (" is delayed", unclear())
            }
            3 | 4 => {
                self.delay(request.clone());
                (" is executed, and again later", self.apply(request))
            }
            5 if matches!(request, Request::Create(..)) => {
                let _ = self.apply(request);
                (" is executed by its first attempt", Err(StoreError::Exists))
            }
            6 if matches!(request, Request::Create(..)) => {
                (" is not executed", Err(StoreError::Exists))
            }
            _ => (" is not executed", unclear()),
        }
    }

    fn delay(&mut self, request: Request) {
        if self.late.len() < MAX_LATE {
            self.late.push(request);
        }
    }

    /// Executes a request that is late.
    pub(super) fn land(&mut self, random: &mut Random) {
        if self.late.is_empty() {
            return;
        }
        let at = random.index(self.late.len());
        let request = self.late.swap_remove(at);
        self.note(|| format!("late: {}", text(&request)));
        let _ = self.apply(&request);
    }

    fn apply(&mut self, request: &Request) -> Result<Answer> {
        match request {
            Request::Create(name, _) if self.objects.contains_key(name) => Err(StoreError::Exists),
            Request::Create(name, bytes) => {
                self.puts += 1;
                self.objects.insert(name.clone(), Arc::clone(bytes));
                Ok(Answer::Done)
            }
            Request::Read(name, range) => {
                let bytes = self.objects.get(name).ok_or(StoreError::NotFound)?;
                let [begin, end] = [range.start, range.end]
                    .map(|at| usize::try_from(at).unwrap().min(bytes.len()));
                Ok(Answer::Bytes(bytes[begin..end].to_vec()))
            }
            Request::List(prefix, after) => {
                let begin = prefix.max(after);
                let from = (Bound::Included(begin.clone()), Bound::Unbounded);
                let names = self.objects.range(from).map(|(name, _)| name);
                let names = names.take_while(|name| name.starts_with(prefix.as_str()));
                let names = names.filter(|name| *name > after).take(LISTED);
                Ok(Answer::Names(names.cloned().collect()))
            }
            Request::Delete(name) => {
                self.objects.remove(name);
                Ok(Answer::Done)
            }
            Request::Wait => Ok(Answer::Done),
        }
    }
}

fn text(request: &Request) -> String {
    let short = |name: &str| name.replace("00000000", "");
    match request {
        Request::Create(name, bytes) => format!("put {} ({} bytes)", short(name), bytes.len()),
        Request::Read(name, range) => format!("get {} {}..", short(name), range.start),
        Request::List(prefix, after) => format!("list {} after {}", short(prefix), short(after)),
        Request::Delete(name) => format!("delete {}", short(name)),
        Request::Wait => "wait".to_owned(),
    }
}

/// The store as one actor uses it.
#[derive(Clone)]
pub(super) struct Client {
    pub(super) cloud: Arc<Mutex<Cloud>>,
    pub(super) actor: usize,
    /// Begins the names of the volume's objects.
    pub(super) prefix: String,
    pub(super) life: Life,
}

impl Client {
    /// The store of another volume.
    pub(super) fn of_volume(&self, prefix: &str) -> Self {
        Self { prefix: prefix.to_owned(), ..self.clone() }
    }

    fn named(&self, name: &str) -> String {
        format!("{}{name}", self.prefix)
    }

    fn cloud(&self) -> MutexGuard<'_, Cloud> {
        self.cloud.lock().unwrap()
    }

    fn send(&self, request: Request) -> InFlight {
        InFlight { client: self.clone(), request: Some(request), id: None }
    }

    async fn done(&self, request: Request) -> Result<()> {
        self.send(request).await.map(|_| ())
    }
}

/// An operation in flight. If its caller ends, it may be executed later, or never.
struct InFlight {
    client: Client,
    request: Option<Request>,
    id: Option<u64>,
}

impl Future for InFlight {
    type Output = Result<Answer>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let client = self.client.clone();
        if client.life.is_over() {
            return Poll::Pending;
        }
        let mut cloud = client.cloud();
        if let Some(request) = self.request.take() {
            let id = cloud.next;
            cloud.next += 1;
            let actor = client.actor;
            cloud.operations.insert(id, Operation { request, actor, answer: None, waker: None });
            self.id = Some(id);
        }
        let id = self.id.unwrap();
        let operation = cloud.operations.get_mut(&id).unwrap();
        match operation.answer.take() {
            Some(answer) => {
                cloud.operations.remove(&id);
                self.id = None;
                Poll::Ready(answer)
            }
            None => {
                operation.waker = Some(context.waker().clone());
                Poll::Pending
            }
        }
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        let Some(id) = self.id else { return };
        let mut cloud = self.client.cloud();
        if let Some(operation) = cloud.operations.remove(&id)
            && operation.answer.is_none()
            && matches!(operation.request, Request::Create(..) | Request::Delete(_))
        {
            cloud.delay(operation.request);
        }
    }
}

impl Store for Client {
    fn create<'a>(&'a self, name: &'a str, bytes: &'a [u8]) -> Pending<'a, Result<()>> {
        Box::pin(self.done(Request::Create(self.named(name), Arc::new(bytes.to_owned()))))
    }

    fn read<'a>(&'a self, name: &'a str, range: Range<u64>) -> Pending<'a, Result<Vec<u8>>> {
        let read = self.send(Request::Read(self.named(name), range));
        Box::pin(async move {
            match read.await? {
                Answer::Bytes(bytes) => Ok(bytes),
                _ => unreachable!("the answer is that of the request"),
            }
        })
    }

    fn list<'a>(&'a self, prefix: &'a str, after: &'a str) -> Pending<'a, Result<Vec<String>>> {
        let list = self.send(Request::List(self.named(prefix), self.named(after)));
        Box::pin(async move {
            match list.await? {
                Answer::Names(names) => {
                    let own = |name: String| name[self.prefix.len()..].to_owned();
                    Ok(names.into_iter().map(own).collect())
                }
                _ => unreachable!("the answer is that of the request"),
            }
        })
    }

    fn delete<'a>(&'a self, name: &'a str) -> Pending<'a, Result<()>> {
        Box::pin(self.done(Request::Delete(self.named(name))))
    }

    fn back_off(&self, _attempt: u32) -> Pending<'_, ()> {
        let wait = self.send(Request::Wait);
        Box::pin(async move {
            let _ = wait.await;
        })
    }
}
