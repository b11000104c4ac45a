//! Where the requests of all sources of one agent wait for their slots. Decides nothing: that is `dispatch.rs`.

use crate::breaker::Verdict;
use crate::dispatch::{Dispatcher, Lane, Learned, NoSlot, Order, Passes};
use crate::shares::{Key, Ticket, Turn};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;
use tokio::sync::{Notify, oneshot};
use tokio::time::Instant;

/// Time alone changes something now and then: silence, a breaker's pause, the budget. Looked at while a request waits.
const LOOK_EVERY: Duration = Duration::from_millis(50);

#[derive(Debug)]
pub(crate) struct Traffic {
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    dispatcher: Dispatcher,
    waiting: HashMap<Ticket, oneshot::Sender<Slot>>,
    /// Of granted slots: rung when it is taken back.
    bells: HashMap<Ticket, Arc<Notify>>,
    /// A timer looks every so often.
    looking: bool,
}

/// A source at an endpoint, in the eyes of all others.
#[derive(Debug)]
pub(crate) struct Place {
    traffic: Arc<Traffic>,
    key: Key,
}

/// A request slot; free again on drop.
#[derive(Debug)]
pub(crate) struct Slot {
    place: Place,
    lane: Lane,
    ticket: Ticket,
    /// Until it is known what became of the request.
    passes: Option<Passes>,
    bell: Arc<Notify>,
}

impl Traffic {
    pub(crate) fn new(metadata: usize, data: usize, uploads: usize) -> Arc<Self> {
        let dispatcher = Dispatcher::new(metadata, data, uploads);
        let state = State { dispatcher, waiting: HashMap::new(), bells: HashMap::new(), looking: false };
        Arc::new(Self { state: Mutex::new(state) })
    }

    /// Requests that could start now without waiting.
    pub(crate) fn free(&self, lane: Lane) -> usize {
        let mut state = self.lock();
        let lane = state.dispatcher.lane(lane);
        lane.capacity().saturating_sub(lane.held())
    }

    /// See [`Dispatcher::open`].
    pub(crate) fn place(self: &Arc<Self>, endpoint: &str, source: &str, part: usize) -> Place {
        let key = self.lock().dispatcher.open(endpoint, source, part, Instant::now());
        Place { traffic: self.clone(), key }
    }

    fn waits(&self, lane: Lane, ticket: Ticket) {
        self.lock().dispatcher.lane(lane).waits(ticket, Instant::now());
    }

    fn moves(&self, lane: Lane, ticket: Ticket, bytes: u64) {
        self.lock().dispatcher.lane(lane).moves(ticket, bytes, Instant::now());
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Gives out what can be given out.
    fn dispatch(self: &Arc<Self>) {
        let mut granted = Vec::new();
        {
            let mut state = self.lock();
            let now = Instant::now();
            for lane in Lane::ALL {
                for order in state.dispatcher.dispatch(lane, now) {
                    granted.extend(state.carry_out(self, lane, order));
                }
            }
        }
        // Not under the lock: the slot of a request that has just gone is dropped here.
        for (to, slot) in granted {
            let _ = to.send(slot);
        }
    }

    /// Looks periodically, until no request waits.
    fn look_while_anybody_waits(self: &Arc<Self>) {
        if std::mem::replace(&mut self.lock().looking, true) {
            return;
        }
        let weak: Weak<Self> = Arc::downgrade(self);
        tokio::spawn(async move {
            loop {
                tokio::time::sleep(LOOK_EVERY).await;
                let Some(traffic) = weak.upgrade() else { return };
                traffic.dispatch();
                let mut state = traffic.lock();
                if !state.dispatcher.anybody_waits() {
                    state.looking = false;
                    return;
                }
            }
        });
    }
}

impl State {
    fn carry_out(
        &mut self,
        traffic: &Arc<Traffic>,
        lane: Lane,
        order: Order,
    ) -> Option<(oneshot::Sender<Slot>, Slot)> {
        match order {
            Order::Displace(ticket) => {
                self.bells.get(&ticket)?.notify_one();
                None
            }
            Order::Grant(ticket, key, passes) => {
                let sender = self.waiting.remove(&ticket).expect("each waiter has a sender");
                self.dispatcher.again(key);
                let place = Place { traffic: traffic.clone(), key };
                let bell = self.bells.entry(ticket).or_default().clone();
                Some((sender, Slot { place, lane, ticket, passes: Some(passes), bell }))
            }
        }
    }
}

impl Place {
    /// Waits for a slot: for its turn, and until the store may be asked; not longer than until `deadline`.
    pub(crate) async fn enter(&self, lane: Lane, deadline: Instant, turn: Turn) -> Result<Slot, NoSlot> {
        let (sender, mut receiver) = oneshot::channel();
        let ticket = {
            let mut state = self.traffic.lock();
            let ticket = state.dispatcher.number();
            state.dispatcher.lane(lane).join(ticket, self.key, turn);
            state.waiting.insert(ticket, sender);
            ticket
        };
        // Dropped on any way out: a caller that does not wait any more keeps no place in the queue.
        let _waiting = Waiting { place: self, lane, ticket };
        self.traffic.dispatch();
        if let Ok(slot) = receiver.try_recv() {
            return Ok(slot);
        }
        self.traffic.look_while_anybody_waits();
        match tokio::time::timeout_at(deadline, &mut receiver).await {
            Ok(Ok(slot)) => Ok(slot),
            _ => Err(self.traffic.lock().dispatcher.why(self.key, lane, turn, Instant::now())),
        }
    }

    /// See [`Dispatcher::is_queued`].
    pub(crate) fn is_queued(&self, lane: Lane) -> bool {
        self.traffic.lock().dispatcher.is_queued(self.key, lane, Instant::now())
    }

    /// See [`Dispatcher::others_move`].
    pub(crate) fn others_move(&self) -> bool {
        self.traffic.lock().dispatcher.others_move(self.key, Instant::now())
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.traffic.lock().dispatcher.close(self.key);
    }
}

struct Waiting<'p> {
    place: &'p Place,
    lane: Lane,
    ticket: Ticket,
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        let mut state = self.place.traffic.lock();
        state.waiting.remove(&self.ticket);
        state.dispatcher.lane(self.lane).cancel(self.ticket, self.place.key);
    }
}

/// Says of a slot how its request gets on. (What it says of one that was given back, nobody hears.)
#[derive(Clone, Debug)]
pub(crate) struct Mover {
    traffic: Arc<Traffic>,
    lane: Lane,
    ticket: Ticket,
}

impl Mover {
    /// From now on the request waits for the store.
    pub(crate) fn waits(&self) {
        self.traffic.waits(self.lane, self.ticket);
    }

    /// It has got, or got rid of, so much; what follows is ours, until it waits again.
    pub(crate) fn moves(&self, bytes: u64) {
        self.traffic.moves(self.lane, self.ticket, bytes);
    }
}

impl Slot {
    pub(crate) fn mover(&self) -> Mover {
        Mover { traffic: self.place.traffic.clone(), lane: self.lane, ticket: self.ticket }
    }

    /// See [`Mover::waits`].
    pub(crate) fn waits(&self) {
        self.place.traffic.waits(self.lane, self.ticket);
    }

    /// See [`Mover::moves`].
    pub(crate) fn moves(&self, bytes: u64) {
        self.place.traffic.moves(self.lane, self.ticket, bytes);
    }

    /// A thread that hangs in the kernel cannot be called back.
    pub(crate) fn cannot_be_displaced(&self) {
        self.place.traffic.lock().dispatcher.lane(self.lane).cannot_be_displaced(self.ticket);
    }

    /// Returns when another source needs the slot more: let go of it, and wait for another.
    pub(crate) async fn displaced(&self) {
        self.bell.notified().await;
    }

    /// The store has answered this source, whatever it said.
    pub(crate) fn answered(&mut self) {
        self.learn(Verdict::Answered, Verdict::Answered);
    }

    /// The store has answered that it cannot.
    pub(crate) fn refused(&mut self) {
        self.learn(Verdict::Answered, Verdict::Failed);
    }

    /// No answer, though there may be a connection.
    pub(crate) fn failed(&mut self) {
        self.learn(Verdict::Unknown, Verdict::Failed);
    }

    /// Not even a connection.
    pub(crate) fn unconnected(&mut self) {
        self.learn(Verdict::Failed, Verdict::Unknown);
    }

    fn learn(&mut self, endpoint: Verdict, source: Verdict) {
        let Some(passes) = self.passes.take() else { return };
        let mut state = self.place.traffic.lock();
        let learned = Learned { endpoint, source };
        state.dispatcher.learn(self.place.key, passes, learned, Instant::now(), rand::random());
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        self.learn(Verdict::Unknown, Verdict::Unknown);
        {
            let mut state = self.place.traffic.lock();
            state.bells.remove(&self.ticket);
            state.dispatcher.lane(self.lane).leave(self.ticket, Instant::now());
        }
        self.place.traffic.dispatch();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn soon() -> Instant {
        Instant::now() + Duration::from_millis(10)
    }

    fn in_time() -> Instant {
        Instant::now() + Duration::from_secs(20)
    }

    #[tokio::test]
    async fn lanes_do_not_take_each_others_slots() {
        let traffic = Traffic::new(1, 3, 1);
        let place = traffic.place("https://a", "s", 1);
        let mut held = Vec::new();
        while let Ok(slot) = place.enter(Lane::Data, soon(), Turn::First).await {
            held.push(slot);
        }
        assert_eq!(held.len(), 3);
        assert!(place.enter(Lane::Metadata, soon(), Turn::First).await.is_ok());
        assert!(place.enter(Lane::Upload, soon(), Turn::First).await.is_ok());
        held.pop();
        assert!(place.enter(Lane::Data, in_time(), Turn::First).await.is_ok());
    }

    #[tokio::test]
    async fn whoever_must_let_go_of_a_slot_is_told() {
        let traffic = Traffic::new(1, 2, 1);
        let mut held = Vec::new();
        for endpoint in ["https://frozen", "https://frozen-too"] {
            let place = traffic.place(endpoint, "s", 1);
            for _ in 0..2 {
                held.push(place.enter(Lane::Data, in_time(), Turn::First).await.unwrap());
            }
        }
        let newcomer = traffic.place("https://healthy", "s", 1);
        let (entered, ()) = tokio::join!(newcomer.enter(Lane::Data, in_time(), Turn::First), async {
            let (_, which, _) = {
                let bells = held.iter().map(|slot| Box::pin(slot.displaced()));
                futures::future::select_all(bells).await
            };
            drop(held.swap_remove(which));
        });
        assert!(entered.is_ok());
    }

    #[tokio::test]
    async fn a_source_is_queued_while_others_have_all_slots_and_it_has_none() {
        let traffic = Traffic::new(1, 1, 1);
        let (mine, others) = (traffic.place("https://a", "s", 1), traffic.place("https://b", "s", 1));
        let of_others = others.enter(Lane::Metadata, in_time(), Turn::First).await.unwrap();
        assert!(!mine.is_queued(Lane::Metadata), "it wants nothing");
        let mut entering = Box::pin(mine.enter(Lane::Metadata, in_time(), Turn::First));
        assert!(futures::poll!(&mut entering).is_pending());
        assert!(mine.is_queued(Lane::Metadata) && !mine.is_queued(Lane::Data));
        drop(of_others);
        let slot = entering.await.unwrap();
        let mut second = Box::pin(mine.enter(Lane::Metadata, in_time(), Turn::First));
        assert!(futures::poll!(&mut second).is_pending());
        assert!(!mine.is_queued(Lane::Metadata), "it waits for the store, too");
        drop((second, slot));
        // A store that is known to be away is no queue.
        for _ in 0..5 {
            mine.enter(Lane::Metadata, in_time(), Turn::First).await.unwrap().unconnected();
        }
        let mut away = Box::pin(mine.enter(Lane::Metadata, in_time(), Turn::First));
        assert!(futures::poll!(&mut away).is_pending());
        assert!(!mine.is_queued(Lane::Metadata));
    }

    #[tokio::test]
    async fn others_move_while_they_hold_slots_and_are_not_silent() {
        let traffic = Traffic::new(1, 1, 1);
        let (mine, others) = (traffic.place("https://a", "s", 1), traffic.place("https://a", "t", 1));
        let own = mine.enter(Lane::Metadata, in_time(), Turn::First).await.unwrap();
        assert!(!mine.others_move() && others.others_move());
        let slot = others.enter(Lane::Data, in_time(), Turn::First).await.unwrap();
        assert!(mine.others_move());
        slot.waits();
        let later = Instant::now() + crate::shares::SILENCE;
        assert!(
            !traffic.lock().dispatcher.others_move(mine.key, later),
            "a frozen store slows no other down"
        );
        slot.moves(1);
        assert!(traffic.lock().dispatcher.others_move(mine.key, later));
        drop((own, slot));
        assert!(!mine.others_move());
    }

    #[tokio::test]
    async fn of_those_who_come_and_go_nothing_is_kept() {
        let traffic = Traffic::new(1, 1, 1);
        for k in 0..10_000 {
            let place = traffic.place(&format!("https://{k}"), "s", 1);
            if k % 1000 == 0 {
                let mut slot = place.enter(Lane::Data, in_time(), Turn::First).await.unwrap();
                // Waits behind it, in vain.
                let waited = place.enter(Lane::Data, soon(), Turn::First).await;
                assert_eq!(waited.err(), Some(NoSlot::Busy));
                slot.unconnected();
            }
        }
        let state = traffic.lock();
        assert!(state.waiting.is_empty() && state.bells.is_empty());
        assert!(state.dispatcher.is_empty());
    }
}
