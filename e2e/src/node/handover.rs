//! Two agents of one node: a standby that starts while another one serves.

use super::{Agent, AgentOptions, Node, ORDERLY_END};
use crate::clock::wait_until;
use crate::processes;
use anyhow::{Context, Result, bail, ensure};
use rustix::process::Signal;
use std::process::ExitStatus;
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(60);

/// What came of a standby.
#[derive(Debug)]
pub enum Outcome {
    /// The agent before has ended, like this, and the standby is the node's agent now.
    Succeeded(ExitStatus),
    /// The standby has ended, like this, and the agent before is still there.
    Failed(ExitStatus),
    /// The agent before and the standby.
    BothEnded(ExitStatus, ExitStatus),
}

impl Node {
    /// Starts another agent beside the one that serves; returns at once.
    pub fn start_standby(&mut self, options: &AgentOptions) -> Result<()> {
        ensure!(self.standby.is_none(), "there is a standby already");
        self.standby = Some(Agent::spawn(&self.places, options, self.runtime.handle())?);
        Ok(())
    }

    /// `kill -9` of the agent that serves, while there is a standby.
    pub fn kill_old_agent(&self) -> Result<()> {
        processes::signal(self.agent().pid(), Signal::KILL)
    }
    /// `kill -9` of the one that would take its place.
    pub fn kill_standby(&self) -> Result<()> {
        let standby = self.standby.as_ref().context("there is no standby")?;
        processes::signal(standby.pid(), Signal::KILL)
    }

    /// Waits until one of the two agents has ended.
    pub fn decide(&mut self) -> Result<Outcome> {
        let (mut old, mut new) = (None, None);
        let agent = self.agent.as_mut().context("the agent is down")?;
        let standby = self.standby.as_mut().context("there is no standby")?;
        wait_until(LIMIT, || {
            old = agent.ended().ok().flatten();
            new = standby.ended().ok().flatten();
            old.is_some() || new.is_some()
        });
        match (old, new) {
            (Some(status), None) => {
                self.agent = self.standby.take();
                Ok(Outcome::Succeeded(status))
            }
            (None, Some(status)) => {
                self.standby = None;
                Ok(Outcome::Failed(status))
            }
            (None, None) => bail!("neither agent has ended within {LIMIT:?}"),
            (Some(old), Some(new)) => {
                self.standby = None;
                Ok(Outcome::BothEnded(old, new))
            }
        }
    }

    /// Another agent takes over; returns when the one before has left in good order and the new one serves.
    pub fn hand_over(&mut self, options: &AgentOptions) -> Result<()> {
        self.start_standby(options)?;
        match self.decide()? {
            Outcome::Succeeded(status) if status.success() => {}
            other => bail!("the hand-over ended otherwise: {other:?}"),
        }
        let pid = self.agent().pid();
        let up = wait_until(ORDERLY_END, || {
            self.agent().status().is_ok_and(|s| s.broker_connected && s.pid == pid)
        });
        ensure!(up, "the new agent does not answer");
        Ok(())
    }
}
