// The Vercel AI SDK: with each API a stream, a call, a second turn and a cancelled answer. Prints one JSON line.
import { createAnthropic } from '@ai-sdk/anthropic'
import { createOpenAI } from '@ai-sdk/openai'
import { createOpenAICompatible } from '@ai-sdk/openai-compatible'
import { generateText, stepCountIs, streamText, tool } from 'ai'
import { z } from 'zod'

const baseURL = `${process.env.GATEWAY}/v1`
const openai = createOpenAI({ baseURL, apiKey: 'none' })
const apis = {
  responses: openai, // its default: the second request refers to the items of the first answer
  chat: openai.chat,
  compatible: createOpenAICompatible({ name: 'local', baseURL, apiKey: 'none' }),
  anthropic: createAnthropic({ baseURL, apiKey: 'none' }),
}
const given = []
const tools = {
  get_weather: tool({
    description: 'Tell the weather.',
    inputSchema: z.object({ city: z.string(), days: z.number().int() }),
    execute: async (input) => {
      given.push(input)
      return 'say plain'
    },
  }),
}
const found = {}
for (const [name, api] of Object.entries(apis)) {
  const model = api('replaying')
  const stream = streamText({ model, prompt: 'say plain' })
  let streamed = ''
  for await (const text of stream.textStream) streamed += text
  given.length = 0
  const asked = { role: 'user', content: 'say weather' }
  const called = await generateText({ model, messages: [asked], tools, stopWhen: stepCountIs(3) })
  const messages = [asked, ...called.response.messages, { role: 'user', content: 'say plain' }]
  const again = await generateText({ model, messages, tools })
  const abort = new AbortController()
  let cancelled = false
  const slow = streamText({
    model: api('slow'),
    prompt: 'say talk',
    abortSignal: abort.signal,
    onAbort: () => (cancelled = true),
    onError: () => {},
  })
  for await (const part of slow.fullStream) if (part.type === 'text-delta') abort.abort()
  found[name] = { streamed, given: [...given], steps: called.steps.length, called: called.text, again: again.text, cancelled }
}
console.log(JSON.stringify(found))
